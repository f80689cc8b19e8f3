"""Memory of a process: what is resident, and which part of it is the process's own."""

from pathlib import Path

import psutil


def memory_bytes(pid: int | None = None) -> dict[str, int]:
    """VmRSS and its anonymous part, RssAnon, of a process, by default this one; the rest is pages of mapped files, which the system can
    drop at any time. Where the system does not tell them apart (it is not Linux), all of it counts as anonymous.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if not status.exists():
        resident = int(psutil.Process(pid).memory_info().rss)
        return {"VmRSS": resident, "RssAnon": resident}
    fields = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8").splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon")}
