"""Processes of a run as threads of one process, for tests."""

from collections.abc import Sequence
from concurrent import futures

from maxbench.distributed import rendezvous
from maxbench.distributed.peer_watch import PeerWatch


def connect(
    address: str,
    processes: Sequence[int],
    process_count: int,
    timeout_s: float = 20.0,
    expected_hosts: Sequence[str] = (),
) -> list[PeerWatch | BaseException]:
    """Has processes rendezvous, the k-th of them on host nk; the result or the error of each."""
    with futures.ThreadPoolExecutor(len(processes)) as pool:
        calls = [
            pool.submit(
                rendezvous.rendezvous,
                address,
                process_count,
                rendezvous.Member(i, f"n{k}", f"{i}.log"),
                timeout_s,
                expected_hosts,
            )
            for k, i in enumerate(processes)
        ]
        return [call.exception() or call.result() for call in calls]
