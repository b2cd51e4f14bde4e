"""Ports of process 0: above those that Linux assigns to outgoing connections."""

FIRST, COUNT = 61440, 4094  # two more remain: the preflight of a job takes one, its run the next


def address(host: str, port: int) -> str:
    """host:port, as '[fd00::1]:61440' for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port(number: int) -> int:
    """The port of a job by its number: two jobs on one node rarely share one."""
    return FIRST + number % COUNT
