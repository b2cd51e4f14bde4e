"""Names of container images: enroot's form for Slurm, docker's for Kubernetes and Run:ai."""

import pathlib
import re

from maxbench.config.errors import UserError


def check_for_slurm(image: str) -> None:
    """Checks RUN_CONF_IMAGE for pyxis: a file, or [REGISTRY#]IMAGE[:TAG].

    Raises:
      UserError: the file does not exist, or the name is docker's.
    """
    if _is_file(image):
        if not pathlib.Path(image).exists():
            raise UserError(
                f"RUN_CONF_IMAGE={image!r} does not exist: ./setup.sh creates one if enroot is "
                "installed; leave it empty to use the Python environment of setup.sh"
            )
        return
    registry, slash, name = image.removeprefix("docker://").partition("/")
    if slash and "#" not in registry and re.search(r"[.:]|^localhost$", registry):
        raise UserError(
            f"RUN_CONF_IMAGE={image!r} is docker's form, in which Slurm's pyxis looks for an image "
            f"{registry}/{name} of Docker Hub: RUN_CONF_IMAGE={registry}#{name}"
        )


def check_for_registry(image: str, scheduler: str) -> None:
    """Checks RUN_CONF_IMAGE for Kubernetes or Run:ai: docker's REGISTRY/IMAGE[:TAG].

    Raises:
      UserError: it is a file, or enroot's form.
    """
    if _is_file(image):
        raise UserError(
            f"RUN_CONF_IMAGE={image!r} is a file, and {scheduler} needs the name of an image in a "
            "registry, as nvcr.io/nvidia/jax:26.06-py3"
        )
    registry, hash_sign, name = re.sub(r"^\w+://", "", image).rpartition("#")
    if hash_sign or "://" in image:
        docker = "/".join(filter(None, [registry.rpartition("@")[2], name]))
        raise UserError(
            f"RUN_CONF_IMAGE={image!r} is enroot's form, and {scheduler} needs docker's: "
            f"RUN_CONF_IMAGE={docker}"
        )


def _is_file(image: str) -> bool:
    return image.startswith(("/", "./", "../", "~")) or image.endswith(".sqsh")
