"""A helper process that reports its own properties and exits."""

from __future__ import annotations

import os
import sys

from tenax._io.helper_channel import Channel


def main(descriptor: int) -> None:
    channel = Channel.from_descriptor(descriptor)
    with open("/proc/self/comm") as comm:
        name = comm.read().strip()
    descriptors = {int(entry) for entry in os.listdir("/proc/self/fd")}
    open_descriptors = [number for number in sorted(descriptors) if os.path.exists(f"/proc/self/fd/{number}")]
    properties = {
        "leads_session": os.getsid(0) == os.getpid(),
        "descriptors": open_descriptors,
        "stdin": os.readlink("/proc/self/fd/0"),
        "isolated": sys.flags.isolated,
        "no_site": sys.flags.no_site,
        "name": name,
        "looks_in_current_directory": "" in sys.path,
        "inheritable": os.get_inheritable(descriptor),
    }
    channel.send((properties,))
