#!/bin/bash
# Creates FILE, the container image IMAGE plus the packages that maxbench needs. setup.sh runs this
# on a compute node.
#
#   launch/image.sh IMAGE FILE
set -eu -o pipefail
IMAGE=$1 FILE=$2
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=maxbench-setup-$$

# [--rw] CONTAINER COMMAND...: runs a command in a container with the checkout mounted, as in a job.
inside() { enroot start --root --mount "$ROOT:$ROOT" --env "PYTHONPATH=$ROOT" "$@"; }
needs=(python3 "$ROOT/launch/needs.py" "$ROOT")

# Current digest of IMAGE, sha256:...; '' if enroot (before 4.0) or the registry does not report it.
digest() {
  if [[ "$IMAGE" == *@sha256:* ]]; then
    echo "${IMAGE##*@}"
  else
    timeout 60 enroot digest "$IMAGE" 2>/dev/null </dev/null || true
  fi
}

{ read -r source && read -r was; } 2>/dev/null <"$FILE.from" || true
now=$(digest)
if [[ -f "$FILE" && "${source:-}" == "$IMAGE" ]] && inside "$FILE" "${needs[@]}"; then
  echo "setup: $FILE, from $IMAGE (${was:-unknown digest}), is complete"
  if [[ -n "${was:-}" && -n "$now" && "$was" != "$now" ]]; then
    echo "setup: note: $IMAGE has changed to $now; to use it, remove $FILE"
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
# The image's own jax stays: the one of PyPI has no GPU support.
# shellcheck disable=SC2016  # expanded by the shell in the container
install='
  python3 - "$1" <<"END" >/tmp/needs.txt
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1], "pyproject.toml").read_text())["project"]
print(*project["dependencies"], sep="\n")
END
  python3 - <<"END" >/tmp/constraints.txt
from importlib import metadata
print(*(f"{name}=={metadata.version(name)}" for name in ("jax", "jaxlib")), sep="\n")
END
  python3 -m pip install --quiet --disable-pip-version-check -r /tmp/needs.txt -c /tmp/constraints.txt
'
if ! inside --rw "$NAME" bash -euc "$install" bash "$ROOT" || ! inside "$NAME" "${needs[@]}"; then
  echo "setup: error: maxbench does not run in IMAGE='$IMAGE', see above; give another" >&2
  exit 2
fi
enroot export --output "$FILE.part" "$NAME"
mv "$FILE.part" "$FILE"
printf '%s\n' "$IMAGE" "$now" >"$FILE.from"
echo "setup: created $FILE from $IMAGE (${now:-unknown digest: needs enroot 4.0})"
