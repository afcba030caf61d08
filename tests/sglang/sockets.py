"""What a process listens on, from /proc."""

import os
import re
import socket
from pathlib import Path


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of the TCP sockets that a process listens on."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    places = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                places.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return places


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
