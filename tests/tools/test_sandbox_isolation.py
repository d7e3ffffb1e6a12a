"""Parts of the isolation: clearing scratch, monitoring the disk, and the list of system calls, interpreted here."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from arpo.tools.sandbox import isolation, scratch, seccomp, zygote


def test_clearing_follows_no_link_and_removes_everything(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "deep").mkdir()
    (folder / "deep" / "link").symlink_to(outside)
    (folder / "deep" / "file").symlink_to(outside / "kept")
    (folder / "dangling").symlink_to("/nowhere")
    (folder / "shut").mkdir()
    (folder / "shut" / "inner").mkdir()
    (folder / "shut" / "inner" / "file").write_text("x")
    (folder / "shut" / "inner").chmod(0)
    (folder / "shut").chmod(0)
    os.mkfifo(folder / "fifo")
    Path(os.fsdecode(bytes(folder) + b"/\xff\xfe\n")).write_text("x")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d" * 50, dir_fd=here)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    folder.chmod(0)
    scratch.clear(str(folder))
    assert list(folder.iterdir()) == []
    assert [path.name for path in outside.iterdir()] == ["kept"]
    scratch.remove(str(folder))
    scratch.remove(str(folder))
    assert not folder.exists()


def test_the_worker_never_blocks_on_a_stream() -> None:
    stdin, out, err = (os.pipe() for _ in range(3))
    ends = [stdin[1], out[0], err[0], os.open("/dev/null", os.O_RDONLY)]
    process = zygote._ConfinedProcess(socket.socket(), 1, "", ends)
    output = zygote._Output(2)
    try:
        assert [os.get_blocking(fd) for fd in ends[:3]] == [False] * 3
        assert not output.read(process.out)  # as when something else has read what was there
        assert (output.total, output.ended) == (0, False)
        os.write(out[1], b"abc")
        assert output.read(process.out)
        assert (bytes(output.data), output.total, output.ended) == (b"ab", 3, False)
        os.write(process.stdin, bytes(1 << 16))
        with pytest.raises(BlockingIOError):
            os.write(process.stdin, b"x")
        os.close(out[1])
        assert not output.read(process.out)
        assert output.ended
    finally:
        process.spawner.close()
        for fd in (*ends, stdin[0], err[1]):
            os.close(fd)


def test_bytes_on_disk_are_counted(tmp_path: Path) -> None:
    disk = scratch.DiskMonitor(str(tmp_path), 1 << 20, os.getpid())
    disk.limit = 1 << 40
    assert not disk.exceeded()  # what this process has ever written does not matter below
    disk.limit, allowed = 1 << 20, scratch.MAX_WRITTEN
    try:
        scratch.MAX_WRITTEN = 1 << 40
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").write_bytes(b"x" * 500_000)
        assert not disk.exceeded()
        (tmp_path / "more").write_bytes(b"x" * 600_000)
        assert disk.exceeded()
        (tmp_path / "more").unlink()
        assert not disk.exceeded()
        deep = tmp_path / "/".join("d" * scratch.MAX_DEPTH)
        deep.mkdir(parents=True)
        assert not disk.exceeded()
        (deep / "deeper").mkdir()
        assert disk.exceeded()
        shutil.rmtree(tmp_path / "d")
        for number in range(scratch.MAX_FILES - 2):
            (tmp_path / f"link{number}").symlink_to("x")
        assert not disk.exceeded()
        (tmp_path / "one more").symlink_to("x")
        assert disk.exceeded()
        (tmp_path / "one more").unlink()
        (tmp_path / "link0").unlink()
        (tmp_path / "way").symlink_to("/usr")
        assert not disk.exceeded()
        scratch.MAX_WRITTEN = 0
        assert disk.exceeded()
    finally:
        scratch.MAX_WRITTEN = allowed
        disk.close()


def test_a_process_that_has_ended_writes_no_more(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    disk = scratch.DiskMonitor(str(tmp_path), 1 << 20, process.pid)
    try:
        assert not disk.exceeded()
        process.kill()
        process.wait()
        assert not disk.exceeded()
    finally:
        disk.close()


def decided(program: bytes, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What a filter answers, by executing it."""
    arguments = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack(
        "iIQ6Q", number if number < 1 << 31 else number - (1 << 32), arch or seccomp.AUDIT_ARCH[machine], 0, *arguments
    )
    code = list(struct.iter_unpack("HBBI", program))
    at = accumulator = 0
    while True:
        kind, yes, no, operand = code[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("I", data, operand)
        elif kind == 0x54:
            accumulator &= operand
        elif kind == 0x15:
            at += yes if accumulator == operand else no
        elif kind == 0x35:
            at += yes if accumulator >= operand else no
        else:
            assert kind == 0x06
            return int(operand)


FILTERS = [(machine, namespaces) for machine in seccomp.AUDIT_ARCH for namespaces in (True, False)]


@pytest.mark.parametrize(("machine", "namespaces"), FILTERS)
def test_the_filter_allows_what_the_tables_name(machine: str, namespaces: bool) -> None:
    program = seccomp.program(namespaces, machine)
    assert len(program) // 8 < 4096
    checked = set(seccomp.numbers(seccomp._ARGUMENT_CHECKED, machine))
    allowed = set(seccomp.numbers(seccomp._TABLE, machine))
    allowed |= set(seccomp.numbers(seccomp._WITH_NAMESPACES, machine)) if namespaces else set()
    assert len(allowed) > 90
    assert not allowed & checked
    for number in set(range(600)) - checked:
        expected = seccomp.ALLOW if number in allowed else seccomp.DENY
        assert decided(program, machine, number) == expected, number
        assert decided(program, machine, number, *[(1 << 64) - 1] * 6) == expected, number
    for number in (*range(600), (1 << 30) - 1, (1 << 31) - 1, (1 << 32) - 1):
        assert decided(program, machine, number | 0x40000000) == seccomp.DENY
    for number in (10**4, 10**6, (1 << 30) - 1):
        assert decided(program, machine, number) == seccomp.DENY
    others = {0x40000003, 0x40000028, 0, 0xC000003E, 0xC00000B7, 0xC00000F3} - {seccomp.AUDIT_ARCH[machine]}
    for arch in others:
        assert {decided(program, machine, number, arch=arch or 1) for number in range(600)} == {seccomp.KILL}


@pytest.mark.parametrize(("machine", "namespaces"), FILTERS)
def test_the_filter_looks_at_arguments(machine: str, namespaces: bool) -> None:
    program = seccomp.program(namespaces, machine)
    names = [entry.split()[0] for entry in seccomp._ARGUMENT_CHECKED.split(",")]
    number = dict(zip(names, seccomp.numbers(seccomp._ARGUMENT_CHECKED, machine), strict=True))

    def allowed(name: str, *arguments: int) -> bool:
        return decided(program, machine, number[name], *arguments) == seccomp.ALLOW

    values = {*range(0, 70), 1024, 1025, 1026, 1030, 1031, 1032, *range(0x5400, 0x5460), 0x8901, 0x53564D41, 1 << 31}
    values |= {random.Random(0).getrandbits(32) for _ in range(300)}
    high = 1 << 32
    assert {value for value in values if allowed("fcntl", 5, value)} == {0, 1, 2, 3, 4, 5, 1030, 1032}
    locks = {value for value in values if decided(program, machine, number["fcntl"], 5, value) == seccomp.DO_NOTHING}
    assert locks == {6, 7}
    assert {decided(program, machine, number[name], 5, 2) for name in ("flock", "fadvise64")} == {seccomp.DO_NOTHING}
    assert {value for value in values if allowed("ioctl", 5, value)} == {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}
    assert {value for value in values if allowed("prctl", value)} == {15, 16, 0x53564D41}
    assert {value for value in values if allowed("prlimit64", value, 8)} == {0}
    assert not allowed("fcntl", 0, 8 + high)
    assert allowed("prlimit64", 0, 3, 1234)
    assert allowed("prlimit64", 0, 0, 0, 1234)  # to read RLIMIT_CPU
    for limit in (1, 1234, high, 1 << 63):
        assert decided(program, machine, number["prlimit64"], 0, 0, limit) == seccomp.DO_NOTHING
        assert decided(program, machine, number["prlimit64"], 1, 0, limit) == seccomp.DENY
    for name in ("sendto", "recvfrom"):
        assert allowed(name, 3, high, 5, 0, 0, 0)
        for address in (1, high, 1 << 63, (1 << 64) - 1):
            assert not allowed(name, 3, 0, 5, 0, address, 0)
    kinds = {(family, kind) for family in range(50) for kind in range(16) if allowed("socketpair", family, kind)}
    assert kinds == {(1, 1)}
    assert allowed("socketpair", 1, 1 | 0o2000000 | 0o4000)
    assert not allowed("socketpair", 1, 2 | 0o2000000)
    assert decided(program, machine, number["clone3"]) == seccomp.ABSENT
    thread = 0x3D0F00
    assert allowed("clone", thread) is namespaces
    assert allowed("clone", thread | high) is namespaces
    for flags in (0, 17, 0x100, 0x4111, *(1 << bit for bit in range(32) if bit != 16)):
        assert not allowed("clone", flags), hex(flags)
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert not allowed("clone", thread | flag)
    shared, shared_checked, private, anonymous = 1, 3, 2, 0x20
    assert allowed("mmap", 0, 4096, 7, private, 3)
    assert allowed("mmap", 0, 4096, 3, private | anonymous)
    assert allowed("mmap", 0, 4096, 3, shared | anonymous)
    for kind in (shared, shared_checked, shared | 0x4000):
        assert allowed("mmap", 0, 4096, 1, kind, 3) is namespaces


def test_only_with_namespaces_is_the_space_on_the_file_system_shown() -> None:
    for machine in seccomp.AUDIT_ARCH:
        for name in ("statfs 137 43", "fstatfs 138 44"):
            (number,) = seccomp.numbers(name, machine)
            assert decided(seccomp.program(True, machine), machine, number) == seccomp.ALLOW
            assert decided(seccomp.program(False, machine), machine, number) == seccomp.DENY


def test_the_filter_of_this_machine_is_the_one_tested() -> None:
    assert seccomp.supported()
    assert seccomp.program(True) == seccomp.program(True, os.uname().machine)
    assert seccomp.program(True) != seccomp.program(False)


def test_scratch_hides_nothing_that_is_to_be_read() -> None:
    assert isolation.scratch_dir(["/usr/lib", "/home/me/tmp/lib", "/tmpfs/lib"]) == "/tmp"
    assert isolation.scratch_dir(["/usr/lib", "/tmp/venv/lib"]) == "/scratch"
    assert isolation.scratch_dir(["/tmp"]) == "/scratch"


def test_a_machine_where_the_order_of_killing_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, text: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(isolation, "_write", refuse)
    isolation.be_killed_first()
