"""Parts of the isolation: clearing scratch, monitoring the disk, and the list of system calls, interpreted here."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from arpo.tools.sandbox import isolation, scratch, seccomp
from arpo.tools.sandbox.streams import Streams


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
    ends = [stdin[1], out[0], err[0]]
    streams = Streams(*ends, 2)
    output = streams.outputs[streams.out]
    try:
        assert [os.get_blocking(fd) for fd in ends] == [False] * 3
        assert not output.read(streams.out)  # as when something else has read what was there
        assert (output.total, output.ended) == (0, False)
        os.write(out[1], b"abc")
        assert output.read(streams.out)
        assert (bytes(output.data), output.total, output.ended) == (b"ab", 3, False)
        os.write(streams.stdin, bytes(1 << 16))
        with pytest.raises(BlockingIOError):
            os.write(streams.stdin, b"x")
        os.close(out[1])
        assert not output.read(streams.out)
        assert output.ended
    finally:
        streams.close()
        for fd in (stdin[0], err[1]):
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
    assert len(allowed) > 80
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
    for name in ("clock_gettime", "clock_getres", "clock_nanosleep"):
        assert all(allowed(name, clock) for clock in range(12))
        assert not any(allowed(name, (~pid << 3 | kind) & 0xFFFFFFFF) for pid in (0, 1, 4000) for kind in range(8))
    assert {value for value in values if allowed("sched_getaffinity", value)} == {0}
    assert all(allowed("futex", 1, operation | 0x80 | clock) for operation in range(14) for clock in (0, 0x100))
    assert {operation for operation in range(0x80) if allowed("futex", 1, operation)} == {0, 9}
    assert allowed("futex", 1, 9 | 0x100)  # how a thread is joined
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


@pytest.mark.parametrize(("machine", "namespaces"), FILTERS)
def test_the_filters_of_a_session(machine: str, namespaces: bool) -> None:
    plain, program = (seccomp.program(namespaces, machine, session=session) for session in (False, True))
    notify = seccomp.notify_program(machine)
    clone, mmap, pause = (seccomp.numbers(entry, machine)[0] for entry in ("clone 56 220", "mmap 9 222", seccomp.PAUSE))
    timers = set(seccomp.numbers(seccomp._TIMERS, machine))
    changed = {n for n in range(600) if decided(plain, machine, n) != decided(program, machine, n)} - {mmap}
    assert changed == {pause, *timers}
    assert decided(program, machine, pause) == seccomp.ALLOW  # the other filter asks
    flags = {0, 17, 0x8000, seccomp.FORK, seccomp.FORK | 0x100, 0x3D0F00, 0x10000 | seccomp.FORK, 1 << 31}
    flags |= {random.Random(0).getrandbits(32) for _ in range(300)} | {seccomp.FORK ^ 1 << bit for bit in range(32)}
    for value in flags:
        if value == seccomp.FORK:
            assert (decided(program, machine, clone, value) == seccomp.ALLOW) is namespaces
        else:
            assert decided(program, machine, clone, value) == decided(plain, machine, clone, value)
    assert decided(plain, machine, clone, seccomp.FORK) == seccomp.DENY
    (limit,) = seccomp.numbers("prlimit64 302 261", machine)
    for kind in range(16):
        only_read = (0, 6, 7)  # CPU time, processes, descriptors
        assert decided(program, machine, limit, 0, kind, 0, 1234) == seccomp.ALLOW
        expected = seccomp.DO_NOTHING if kind in only_read else seccomp.ALLOW
        assert decided(program, machine, limit, 0, kind, 1234) == expected
        assert decided(program, machine, limit, 1, kind, 1234) == seccomp.DENY
    assert {kind for kind in range(64) if decided(program, machine, mmap, 0, 0, 0, kind) == seccomp.ALLOW} == {
        2 | high for high in (0, 16, 32, 48)
    }
    asked = {n for n in range(600) if decided(notify, machine, n) == seccomp.NOTIFY}
    assert asked == {pause}
    assert {value for value in flags if decided(notify, machine, clone, value) == seccomp.NOTIFY} == {seccomp.FORK}
    assert {decided(notify, machine, n, seccomp.FORK, arch=1) for n in range(600)} == {seccomp.ALLOW}


def test_copying_keeps_links_times_and_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "b").mkdir(parents=True)
    target.mkdir()
    (source / "a" / "file").write_bytes(b"x" * 100_000)
    os.link(source / "a" / "file", source / "a" / "b" / "twin")
    (source / "link").symlink_to("/nowhere")
    with open(source / "sparse", "wb") as file:
        file.truncate(10_000_000)
        file.seek(5_000_000)
        file.write(b"middle")
    (source / "empty").touch(0o400)
    os.utime(source / "a" / "file", ns=(1, 2))
    os.utime(source / "a", ns=(3, 4))

    def seen(folder: Path) -> list[tuple[object, ...]]:
        found = []
        for path in sorted(folder.rglob("*")):
            info = path.lstat()
            data = b"" if path.is_symlink() or path.is_dir() else path.read_bytes()
            found.append((str(path.relative_to(folder)), info.st_mode, info.st_nlink, info.st_mtime_ns, data))
        return found

    ends = [os.open(path, scratch.DIRECTORY) for path in (source, target)]
    scratch.copy(*ends)
    for end in ends:
        os.close(end)
    assert seen(target) == seen(source)
    assert (target / "sparse").stat().st_blocks <= (source / "sparse").stat().st_blocks + 16
    assert os.readlink(target / "link") == "/nowhere"
    (target / "a" / "file").write_text("changed")
    assert (source / "a" / "file").read_bytes() == b"x" * 100_000
    assert (target / "a" / "b" / "twin").read_text() == "changed"


def test_copying_links_files_whose_path_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    ends = [os.open(tmp_path / name, scratch.DIRECTORY) for name in ("source", "target")]
    deepest = os.dup(ends[0])
    for _ in range(20):  # of 250 bytes each; a path may have 4,096
        os.mkdir("d" * 250, dir_fd=deepest)
        deepest = os.open("d" * 250, scratch.DIRECTORY, dir_fd=deepest)
    os.close(os.open("a", os.O_CREAT | os.O_WRONLY, dir_fd=deepest))
    os.link("a", "b", src_dir_fd=deepest, dst_dir_fd=deepest)
    scratch.copy(*ends)
    found = os.dup(ends[1])
    for _ in range(20):
        found = os.open("d" * 250, scratch.DIRECTORY, dir_fd=found)
    assert [os.stat(name, dir_fd=found).st_nlink for name in "ab"] == [2, 2]
    for name in ("source", "target"):
        scratch.remove(str(tmp_path / name))


def test_what_is_too_much_to_copy(tmp_path: Path) -> None:
    for number in range(scratch.MAX_FILES):
        (tmp_path / str(number)).symlink_to("x")
    assert scratch.is_small(str(tmp_path))
    (tmp_path / "one more").symlink_to("x")
    assert not scratch.is_small(str(tmp_path))
    deep = tmp_path / "below" / "/".join("d" * scratch.MAX_DEPTH)
    deep.mkdir(parents=True)
    assert scratch.is_small(str(tmp_path / "below"))
    (deep / "deeper").mkdir()
    assert not scratch.is_small(str(tmp_path / "below"))
