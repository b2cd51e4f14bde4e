"""Text that launchers, containers and clouds put in front of each line of a log."""

import datetime
import json
import re

MOST = 6  # prefixes of one line
PREFIX = re.compile(
    rb"""
    [ ]*\d{1,7}:[ ]                                     # srun --label
    |\[pod/[^\]\s]{1,300}\][ ]?                         # kubectl logs --prefix
    |\[(?:default|rank|[a-z]{1,20}-)\d{1,7}\]:[ ]?      # torchrun --tee
    |\[\d{1,7},\d{1,7}\]<std(?:out|err)>:[ ]?           # mpirun --tag-output
    |[A-Za-z0-9][\w.-]{0,99}[ ]+\|[ ](?![ ]*[\d.-])     # docker compose, stern
    |std(?:out|err)[ ][FP][ ]                           # files of Kubernetes nodes
    |\d{13}[\t ]+                                       # CloudWatch: milliseconds since 1970
    |\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?
      (?:Z|[+-]\d\d:?\d\d|[ ]UTC)?\]?[\t ]+             # kubectl logs --timestamps, GKE
    """,
    re.VERBOSE,
)
# The rank, or the pod, in the first prefix of a line.
RANK = re.compile(
    rb"[ ]*(\d{1,7}):[ ]|\[(?:default|rank|[a-z]{1,20}-)(\d{1,7})\]:|\[\d{1,7},(\d{1,7})\]<std"
    rb"|\[pod/([^\]\s]{1,300})\]"
)
STAMP = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
# Keys of a message in a JSON record: Google Cloud, Docker, fluentd.
MESSAGES = ("textPayload", "message", "log", "msg")
JSON_START = tuple(b'"%b"' % key.encode() for key in MESSAGES)


def strip_prefixes(line: bytes) -> bytes:
    """A line of a program, without the prefixes of what launched it and what stored it."""
    if line.lstrip().startswith(b"{") and any(key in line for key in JSON_START):
        line = _message(line)
    for _ in range(MOST):
        match = PREFIX.match(line)
        if not match:
            break
        line = line[match.end() :]
    return line


def rank_of(line: bytes) -> bytes:
    """The rank, or the pod, whose line a launcher says that it is; b'' if it does not."""
    match = RANK.match(line)
    return next(filter(None, match.groups()), b"") if match else b""


def _message(line: bytes) -> bytes:
    """The message of a JSON record, or the line if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line
    texts = (record.get(key) for key in MESSAGES)
    text = next((text for text in texts if isinstance(text, str)), None)
    return line if text is None else text.encode("utf-8", "replace").strip(b"\r\n")


def time_of(line: bytes) -> float:
    """Seconds of the last date and time in a line's first 200 bytes, 0 if there is none.

    The program's own is behind those of the launcher and the cloud. Only differences are meant.
    """
    for match in reversed([*STAMP.finditer(line[:200])]):
        date, clock, fraction = (part.decode() if part else "" for part in match.groups())
        try:
            moment = datetime.datetime.fromisoformat(f"{date}T{clock}+00:00")
        except ValueError:
            continue
        return moment.timestamp() + float(f"0.{fraction or 0}")
    return 0.0
