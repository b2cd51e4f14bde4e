#!/bin/bash
# Makes FILE, a container image with what maxbench needs, of IMAGE; for setup.sh, on a compute node.
#
#   launch/image.sh IMAGE FILE
set -eu -o pipefail
IMAGE=$1 FILE=$2
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=maxbench-setup-$$

# [--rw] CONTAINER COMMAND..., with the checkout, as a job has it
inside() { enroot start --root --mount "$ROOT:$ROOT" --env "PYTHONPATH=$ROOT" "$@"; }
needs=(python3 "$ROOT/launch/needs.py" "$ROOT")

# What IMAGE is today, sha256:...; '' where enroot (before 4.0) or the registry does not say.
digest() {
  if [[ "$IMAGE" == *@sha256:* ]]; then
    echo "${IMAGE##*@}"
  else
    timeout 60 enroot digest "$IMAGE" 2>/dev/null </dev/null || true
  fi
}

{ read -r made_of && read -r was; } 2>/dev/null <"$FILE.from" || true
now=$(digest)
if [[ -f "$FILE" && "${made_of:-}" == "$IMAGE" ]] && inside "$FILE" "${needs[@]}"; then
  echo "setup: $FILE is made of $IMAGE (${was:-digest not known}) and has all"
  if [[ -n "${was:-}" && -n "$now" && "$was" != "$now" ]]; then
    echo "setup: note: $IMAGE is another image by now, $now; to take it, remove $FILE"
  fi
  exit 0
fi
trap 'rm -f "$FILE.base" "$FILE.part"; enroot remove --force "$NAME" >/dev/null 2>&1 || true' EXIT
rm -f "$FILE.base" "$FILE.part"
enroot import --output "$FILE.base" "$IMAGE" || {
  echo "setup: error: IMAGE='$IMAGE' cannot be imported; give another with jax for GPUs" >&2
  exit 2
}
enroot create --name "$NAME" "$FILE.base"
# The image's own jax stays: one of PyPI would know no GPU.
# shellcheck disable=SC2016  # for the shell inside
install='
  python3 - "$1" <<"END" >/tmp/needs.txt
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1], "pyproject.toml").read_text())["project"]
print(*project["dependencies"], sep="\n")
END
  python3 - <<"END" >/tmp/kept.txt
from importlib import metadata
print(*(f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib")), sep="\n")
END
  python3 -m pip install --quiet --disable-pip-version-check -r /tmp/needs.txt -c /tmp/kept.txt
'
if ! inside --rw "$NAME" bash -euc "$install" bash "$ROOT" || ! inside "$NAME" "${needs[@]}"; then
  echo "setup: error: maxbench does not run in IMAGE='$IMAGE', see above; give another" >&2
  exit 2
fi
enroot export --output "$FILE.part" "$NAME"
mv "$FILE.part" "$FILE"
printf '%s\n' "$IMAGE" "$now" >"$FILE.from"
echo "setup: $FILE is made of $IMAGE (${now:-digest not known: enroot 4.0 tells it})"
