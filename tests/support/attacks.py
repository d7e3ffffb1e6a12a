"""Scripts that attack the sandbox, as data; how they are made and judged is in `attack_arena`.

Above each stands `### name [tier] [+] [-> how it must end]`.
"""

SCRIPTS = r"""
### connects by TCP
refused(socket.create_connection, ("127.0.0.1", W["tcp"]), 1)

### sends by UDP
refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", W["udp"])))

### listens
refused(lambda: socket.create_server(("127.0.0.1", 0)))

### connects to a socket by its path
refused(lambda: socket.socket(socket.AF_UNIX).connect(W["path"]))

### connects to an abstract socket
refused(lambda: socket.socket(socket.AF_UNIX).connect(W["abstract"]))

### sends to an abstract socket
refused(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", W["datagrams"]))

### sends to an abstract socket from a pair
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
    refused(lambda: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", W["datagrams"]))
left, right = socket.socketpair()
refused(left.sendto, b"x", W["datagrams"])
left.send(b"fine")
assert right.recv(9) == b"fine"

### passes descriptors on
left, right = socket.socketpair()
refused(socket.send_fds, left, [b"x"], [0])

### opens other kinds of sockets
for family in range(64):
    for kind in (1, 2, 3, 5):
        forbidden("socket", family, kind, 0)

### binds the twin of a pair
left, right = socket.socketpair()
forbidden("bind", left.fileno(), struct.pack("H5s", 1, b"\0arpo"), 7)
forbidden("connect", left.fileno(), struct.pack("H5s", 1, b"\0arpo"), 7)

### reads the home folder
refused(open, W["home file"])
try:
    seen = os.listdir(W["home"])
except OSError:
    seen = []  # where Python lies in the home folder, the way to it can be seen, and nothing else
assert not [name for name in seen if os.path.isfile(os.path.join(W["home"], name))]

### reads the files of the machine
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/sys/kernel/notes",
             "/proc/self/maps", "/proc/meminfo", "/proc/cmdline", "/proc/1/status", "/var/log", "/run", "/boot"):
    refused(os.open, path, os.O_RDONLY)

### reads a file that everyone may read
refused(open, W["canary"])

### reads the environment of the supervisor
for pid in (W["supervisor"], os.getppid(), "self"):
    refused(open, f"/proc/{pid}/environ", "rb")
assert not any("secret" in text.lower() for item in os.environ.items() for text in item)

### reads the memory of the supervisor by proc
for pid in (W["supervisor"], os.getppid()):
    refused(open, f"/proc/{pid}/mem", "rb")
    refused(open, f"/proc/{pid}/maps", "rb")

### reads the memory of the supervisor
local = ctypes.create_string_buffer(W["secret"][1])
mine = struct.pack("PN", ctypes.addressof(local), len(local))
theirs = struct.pack("PN", *W["secret"])
for pid in (W["supervisor"], os.getppid(), 1):
    forbidden("process_vm_readv", pid, mine, 1, theirs, 1, 0)
assert b"secret" not in local.raw

### writes the memory of the supervisor
local = ctypes.create_string_buffer(b"x" * (W["secret"][1] - 1))
mine = struct.pack("PN", ctypes.addressof(local), len(local))
forbidden("process_vm_writev", W["supervisor"], mine, 1, struct.pack("PN", *W["secret"]), 1, 0)

### takes descriptors of the supervisor
for pid in (W["supervisor"], os.getppid()):
    forbidden("pidfd_open", pid, 0)
forbidden("pidfd_getfd", 0, 0, 0)
forbidden("kcmp", os.getpid(), W["supervisor"], 0, 0, 0)

### traces the supervisor and a victim
for pid in (W["victim"], os.getppid()):
    forbidden("ptrace", 16, pid, 0, 0)
    forbidden("ptrace", 0x4206, pid, 0, 0)
forbidden("ptrace", 0, 0, 0, 0)

### finds inherited descriptors
for fd in range(3, 70000):
    try:
        os.fstat(fd)
    except OSError:
        continue
    through(f"descriptor {fd} is open")

### uses its three descriptors for more than they are for
import fcntl, stat
assert [stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in range(3)] == [True] * 3
assert [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in range(3)] == [os.O_RDONLY, os.O_WRONLY, os.O_WRONLY]
refused(os.write, 0, b"x")
refused(os.read, 1, 1)

### makes files outside
for path in W["new"]:
    refused(open, path, "x")
    refused(os.mkdir, path)
    refused(os.symlink, "/", path)
    refused(os.mkfifo, path)

### makes devices
for path in ("device", *W["new"]):
    refused(os.mknod, path, 0o20666, os.makedev(1, 3))

### writes to the libraries
for path in (os.__file__, ctypes.__file__, W["stdlib"] + "/this.py"):
    refused(os.open, path, os.O_WRONLY)
    refused(os.open, path, os.O_RDWR | os.O_APPEND)
    refused(os.rename, path, path + "~")
    refused(os.unlink, path)
    refused(os.chmod, path, 0o644)

### writes to a file that everyone may write
refused(open, W["canary"], "r+")
refused(open, W["canary"], "w")
refused(open, W["canary"], "a")

### cuts a file short
refused(os.truncate, W["canary"], 0)

### changes permissions
refused(os.chmod, W["canary"], 0o600)
refused(os.chmod, W["shared"], 0o700)

### changes the owner
refused(os.chown, W["canary"], os.getuid(), os.getgid())
forbidden("fchownat", -100, W["canary"].encode(), 1, 1, 0)

### changes times
refused(os.utime, W["canary"], (0, 0))

### changes extended attributes
refused(os.setxattr, W["canary"], "user.arpo", b"x")
open("own", "w").close()
refused(os.setxattr, "own", "user.arpo", b"x")

### renames and removes outside
refused(os.rename, W["canary"], W["canary"] + "~")
refused(os.rename, W["canary"], "stolen")
refused(os.unlink, W["canary"])
refused(os.rmdir, W["shared"])
open("own", "w").close()
refused(os.rename, "own", W["shared"] + "/own")
refused(os.replace, "own", W["canary"])

### links across the wall
refused(os.link, W["canary"], "stolen")
open("own", "w").close()
refused(os.link, "own", W["shared"] + "/own")
refused(os.link, W["canary"], W["shared"] + "/link")

### follows a symbolic link out
os.symlink(W["canary"], "way")
os.symlink(W["shared"], "folder")
for mode in ("r", "r+", "w", "a"):
    refused(open, "way", mode)
refused(open, "folder/new", "w")
refused(open, "folder/kept")
refused(os.chmod, "way", 0o600)
refused(os.utime, "way", (0, 0))
refused(os.truncate, "way", 0)

### leaves links for the wiping to follow
os.mkdir("a")
os.mkdir("a/b")
for number in range(20):
    os.symlink(W["shared"], f"a/b/{number}")
    os.symlink(W["canary"], f"a/{number}")
    os.symlink(W["shared"] + "/", f"{number}")
    os.symlink("../" * number + W["shared"].lstrip("/"), f"a/up{number}")
os.symlink(".", "itself")
os.symlink("a", "b")

### climbs out by a descriptor
for where in (".", "/"):
    here = os.open(where, os.O_PATH)
    refused(os.open, "../" * 20 + "etc/passwd", os.O_RDONLY, dir_fd=here)
    refused(os.open, "../" * 20 + W["canary"].lstrip("/"), os.O_RDWR, dir_fd=here)
os.chdir("/")
refused(open, W["canary"].lstrip("/"))
refused(open, "arpo-new", "w")

### opens files by their handle
forbidden("open_by_handle_at", -100, struct.pack("Ii8x", 8, 1), 0)

### mounts
forbidden("mount", b"none", os.getcwd().encode(), b"tmpfs", 0, None)
forbidden("mount", b"none", os.getcwd().encode(), b"proc", 0, None)
forbidden("umount2", b"/tmp", 2)
forbidden("open_tree", -100, b"/", 1)
forbidden("fsopen", b"tmpfs", 0)

### changes its root
forbidden("chroot", b".")
forbidden("pivot_root", b".", b".")

### forks +
for attempt in range(64):
    refused(os.fork)
    refused(os.forkpty)
    forbidden("clone", signal.SIGCHLD, 0, 0, 0, 0)
    if X86:
        forbidden(57)
        forbidden(58)

### starts a daemon
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3)
        os._exit(0)
except OSError:
    pass
else:
    through("it has forked")
refused(os.setsid)

### starts programs
refused(os.execv, "/bin/true", ["true"])
refused(os.execv, sys.executable, ["python"])
refused(subprocess.run, ["/bin/true"])
refused(os.posix_spawn, "/bin/true", ["true"], {})
forbidden("execveat", 0, b"", None, None, 0x1000)
open("own", "wb").write(b"#!/bin/true")
refused(os.execv, "own", ["own"])

### bombs with threads [namespaces] +
ready = threading.Event()
threading.stack_size(1 << 16)
made = []
try:
    for number in range(500):
        made.append(threading.Thread(target=ready.wait, args=(60,)))
        made[-1].start()
except RuntimeError:
    pass
else:
    through("500 threads")
if not 20 < len(made) < 70:
    through(f"{len(made)} threads")
time.sleep(0.2)
ready.set()

### starts threads [landlock]
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    through("a thread")
for flags in (0x10000, 0x3D0F00, 0x10900):
    forbidden("clone", flags, 0, 0, 0, 0)

### makes namespaces
for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x7E020080):
    forbidden("unshare", flag)
    forbidden("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    forbidden("clone", (flag | 0x10F00) & ~0x80, 0, 0, 0, 0) if flag != 0x80 else None
    forbidden("clone3", struct.pack("Q10Q", flag, *[0] * 10), 88)
    forbidden("setns", 0, flag)

### signals others
for pid in (W["supervisor"], W["victim"], os.getppid(), os.getpid()):
    for number in (0, signal.SIGUSR1, signal.SIGTERM):
        forbidden("kill", pid, number)
        forbidden("tkill", pid, number)
        forbidden("tgkill", pid, pid, number)
        forbidden("rt_sigqueueinfo", pid, number, bytes(128))
refused(os.kill, W["victim"], signal.SIGKILL)
for pid in (-1, 0, 1):
    refused(os.kill, pid, 0)

### signals by a descriptor
for pid in (W["victim"], W["supervisor"]):
    forbidden("pidfd_open", pid, 0)
for fd in range(3):
    forbidden("pidfd_send_signal", fd, signal.SIGTERM, None, 0)

### has the kernel signal others
import fcntl
reading, writing = os.pipe()
left, right = socket.socketpair()
for fd in (reading, left.fileno()):
    for pid in (W["supervisor"], -W["supervisor"], os.getppid(), os.getpid()):
        forbidden("fcntl", fd, 8, pid)
        forbidden("fcntl", fd, 15, struct.pack("ii", 1, pid))
        forbidden("ioctl", fd, 0x8901, struct.pack("i", pid))
        forbidden("ioctl", fd, 0x8902, struct.pack("i", pid))
    forbidden("fcntl", fd, 10, signal.SIGTERM)
    forbidden("ioctl", fd, 0x5452, struct.pack("i", 1))
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(writing, b"x")
right.send(b"x")
for command in (1024, 1026):
    forbidden("fcntl", os.open(".", os.O_RDONLY), command, 0)

### sets limits of others
for pid in {W["supervisor"], os.getppid(), 1, W["victim"]} - {0}:
    forbidden("prlimit64", pid, resource.RLIMIT_CORE, struct.pack("QQ", 0, 0), None)
    forbidden("prlimit64", pid, resource.RLIMIT_NOFILE, None, ctypes.create_string_buffer(16))

### slows others down
for pid in (W["supervisor"], W["victim"], os.getppid(), 0):
    forbidden("setpriority", 0, pid, 19)
    forbidden("sched_setaffinity", pid, 8, struct.pack("Q", 1))
    forbidden("sched_setscheduler", pid, 5, struct.pack("i", 0))
    forbidden("ioprio_set", 1, pid, 0x6000)

### raises its own limits
for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY:
        through(f"no limit {kind}")
    try: resource.setrlimit(kind, (hard + 4096, hard + 4096))
    except (ValueError, OSError): pass
    if resource.getrlimit(kind) != (soft, hard): through(f"limit {kind}")

### gains rights
forbidden("setresuid", 0, 0, 0)
forbidden("setgroups", 0, None)
forbidden("capset", struct.pack("Ii", 0x20080522, 0), b"\xff" * 24)
held = ctypes.create_string_buffer(24)
forbidden("sethostname", b"x", 1)
assert os.path.isdir("/tmp")

### opens a ring of requests
forbidden("io_uring_setup", 8, ctypes.create_string_buffer(120))

### loads programs into the kernel
forbidden("bpf", 5, ctypes.create_string_buffer(128), 128)
forbidden("bpf", 0, struct.pack("IIII", 2, 4, 4, 1) + bytes(112), 128)

### measures the machine
for pid in (0, -1, W["supervisor"]):
    forbidden("perf_event_open", struct.pack("IIQ", 1, 112, 0) + bytes(96), pid, -1 if pid >= 0 else 0, -1, 0)

### handles page faults
for flags in (0, 1):
    forbidden("userfaultfd", flags)

### keeps keys
forbidden("add_key", b"user", b"arpo", b"x", 1, -3)
forbidden("keyctl", 0, -3, 1)

### installs filters of its own
allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(allow, 8)
described = struct.pack("HxxxxxxP", 1, ctypes.addressof(buffer))
forbidden("seccomp", 1, 0, described)
forbidden("seccomp", 1, 8, described)
forbidden("prctl", 22, 2, described, 0, 0)

### changes its personality
for value in (0xFFFFFFFF, 0x0008, 0x0040000):
    forbidden("personality", value)

### wants to survive the worker
for option, value in ((1, 0), (4, 1), (36, 1), (0x59616D61, -1), (38, 0), (24, 0), (8, 1)):
    forbidden("prctl", option, value, 0, 0, 0)

### keeps memory that belongs to nobody
forbidden("memfd_create", b"arpo", 0)
refused(os.memfd_create, "arpo")
for name in ("shmget", "semget", "msgget"):
    forbidden(name, 0x6172706F, 4096, 0o1666)
forbidden("mq_open", b"arpo", 0o102, 0o666, None)

### watches files
forbidden("inotify_init1", 0)
forbidden("fanotify_init", 0, 0)

### makes every call that is not on the list
for number in W["denied"]:
    forbidden(number, -1, -1, -1, -1, -1, -1)

### calls by the numbers of x32
for number in range(600):
    forbidden(number | 0x40000000, -1, -1, -1, -1, -1, -1)
for number in (0x80000000 | 39, 0xFFFFFFFF, 100000):
    forbidden(number)

### calls by the numbers of 32 bits -> killed
if not X86:
    libc.abort()
area = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
area.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # eax = getpid; int 0x80; return
function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
print("pid", function())

### fills the memory -> memory
held = []
while True:
    held.append(bytearray(1 << 20))

### fills the memory in small pieces -> memory
held = None
while True:
    held = [held, object()]

### maps much memory
held = []
def more():
    for number in range(10_000):
        held.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
refused(more)
held.clear()
zero = os.open("/dev/zero", os.O_RDONLY)
def again():
    for number in range(10_000):
        held.append(mmap.mmap(zero, 1 << 20, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
refused(again)

### locks memory
area = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(area))
if libc.mlock(ctypes.c_void_p(address), 1 << 20) == 0 or libc.mlockall(3) == 0:
    through("locked")

### opens many files
held = []
def more():
    for number in range(1000):
        held.extend(os.pipe())
refused(more)

### writes a big file -> held killed
block = bytes(1 << 20)
def more():
    with open("big", "wb", buffering=0) as file:
        for number in range(4 * W["limits"]["scratch_mb"]):
            file.write(block)
refused(more)
print("held")

### writes many files -> held killed
block = bytes(1 << 20)
def more():
    for number in range(4 * W["limits"]["scratch_mb"]):
        with open(f"big{number}", "wb", buffering=0) as file:
            file.write(block)
            time.sleep(0.05)
refused(more)
print("held")

### writes to files that have no name any more -> held killed
block = bytes(1 << 20)
held = []
def more():
    for number in range(100):
        file = open(f"big{number}", "wb", buffering=0)
        os.unlink(f"big{number}")
        held.append(file)
        for _ in range(W["limits"]["scratch_mb"] - 1):
            file.write(block)
            time.sleep(0.002)
refused(more)
print("held")

### writes to files that are only mapped -> held killed
size = (W["limits"]["scratch_mb"] - 1) << 20
block = b"x" * size
def more():
    for number in range(100):
        with open(f"big{number}", "wb+", buffering=0) as file:
            os.unlink(f"big{number}")
            file.truncate(size)
            with mmap.mmap(file.fileno(), size) as area:
                area[:] = block
            libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)  # it stays when it is closed
        time.sleep(0.01)
refused(more)
print("held")

### writes where the worker cannot look -> held killed
block = bytes(1 << 20)
os.mkdir("shut", 0o300)
def more():
    for number in range(3 * W["limits"]["scratch_mb"]):
        with open(f"shut/{number}", "wb", buffering=0) as file:
            file.write(block)
            time.sleep(0.05)
refused(more)
print("held")

### writes deeper than a path can say -> held killed
block = bytes(1 << 20)
def more():
    for number in range(100):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    for number in range(3 * W["limits"]["scratch_mb"]):
        with open(f"big{number}", "wb", buffering=0) as file:
            file.write(block)
            time.sleep(0.05)
refused(more)
print("held")

### makes a file with a hole
with open("sparse", "wb") as file:
    refused(file.truncate, 1 << 40)
    refused(os.posix_fallocate, file.fileno(), 0, 1 << 40)
    file.seek(1 << 40)
    file.write(b"x")
    refused(file.flush)
    os.dup2(os.open("/dev/null", os.O_WRONLY), file.fileno())

### reserves space -> held killed
def more():
    for number in range(100):
        with open(f"big{number}", "wb+") as file:
            os.posix_fallocate(file.fileno(), 0, (W["limits"]["scratch_mb"] - 1) << 20)
            libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE, file.fileno(), 0)  # it stays when it is closed
        os.unlink(f"big{number}")
        time.sleep(0.02)
refused(more)
print("held")

### makes empty files without end -> held killed
def more():
    for number in range(200_000):
        os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
refused(more)
print("held")

### makes folders without end -> held killed
def more():
    for number in range(200_000):
        os.mkdir(str(number))
refused(more)
print("held")

### makes links without end -> held killed
open("0", "w").close()
def more():
    for number in range(1, 200_000):
        os.symlink("x" * 2000, f"{number}s")
        os.link("0", str(number))
refused(more)
print("held")

### floods its output -> killed
while True:
    os.write(1, b"x" * 65536)

### floods its errors -> killed
while True:
    sys.stderr.write("x" * 65536)

### floods both with text -> killed
while True:
    print("y" * 1000)
    print("z" * 1000, file=sys.stderr)

### loops -> timeout
while True:
    pass

### loops and ignores all signals -> timeout
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    try:
        time.sleep(1)
    except BaseException:
        pass

### stops itself
for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN):
    refused(os.kill, os.getpid(), number)
    refused(signal.raise_signal, number)

### recurses
def deeper(n):
    return deeper(n + 1)
try:
    deeper(0)
except RecursionError:
    pass

### recurses without a limit -> memory killed error timeout
sys.setrecursionlimit(10 ** 9)
def deeper(n):
    return deeper(n + 1)
deeper(0)

### recurses in C -> killed memory error
sys.setrecursionlimit(10 ** 9)
import json, pickle
value = []
for number in range(10 ** 6):
    value = [value]
pickle.dumps(value)
json.dumps(value)
repr(value)

### nests brackets -> held memory error killed
for text in ("(" * 10 ** 5 + ")" * 10 ** 5, "-" * 10 ** 5 + "1", "x" + ".x" * 10 ** 5, "1" + "+1" * 10 ** 5):
    try:
        compile(text, "", "exec")
    except (SyntaxError, RecursionError, MemoryError):
        pass
print("held")

### falls into address 0 -> killed
ctypes.string_at(0)

### aborts -> killed
libc.abort()

### exits with a number -> error
sys.exit(3)

### exits early and says nothing -> ok
os._exit(0)

### exits early with an error -> error
print("held")
os._exit(7)

### forges an answer -> error
answer = struct.pack("!Bd?II", 0, 0.1, False, 5, 0) + b"held\n"
for fd in range(1024):
    try:
        os.write(fd, answer)
    except OSError:
        pass
print("ok")
raise ValueError("not ok")

### closes its descriptors -> error
os.closerange(0, 1024)
raise ValueError

### closes its descriptors and loops -> timeout
os.closerange(0, 1024)
while True:
    pass

### leaves a thread behind [namespaces]
def loop():
    while True:
        time.sleep(0.01)
threading.Thread(target=loop, daemon=True).start()

### leaves a thread that holds on [namespaces] -> timeout
def loop():
    while True:
        time.sleep(0.01)
threading.Thread(target=loop).start()

### leaves work for later
import atexit
def late():
    time.sleep(0.1)
    open("late", "w").close()
atexit.register(late)
signal.signal(signal.SIGALRM, lambda *args: open("later", "w").close())
signal.setitimer(signal.ITIMER_REAL, 0.1)

### leaves files without permissions -> held killed
os.umask(0o777)
for name in ("a", "b", "c"):
    os.mkdir(name, 0o700)
    os.close(os.open(name + "file", os.O_CREAT | os.O_WRONLY, 0))
os.umask(0)
os.mkdir("d", 0o700)
os.mkdir("d/e", 0o700)
open("d/e/f", "w").close()
try:
    os.chmod("d/e", 0)
    os.chmod("d", 0)
    os.chmod(".", 0)
except PermissionError:
    pass
print("held")

### leaves very deep folders -> held killed
for number in range(3000):
    os.mkdir("d")
    os.chdir("d")
open("end", "w").close()
print("held")

### leaves odd names
for number in range(1, 256):
    if number not in (0x2E, 0x2F):
        os.mkdir(bytes([number]))
        open(bytes([number, number]), "w").close()
        open(bytes([number]) + b"/" + b"\xff" * 255, "w").close()
for name in ("...", "--", "~~", "**", "a\nb", "\x7f" * 255):
    open(name, "w").close()

### leaves 8000 files -> held killed
for number in range(8000):
    open(str(number), "w").close()
print("held")

### moves scratch away
here = os.getcwd()
os.chdir("/")
refused(os.rename, here, here + "x")
refused(os.rmdir, here)
refused(os.symlink, "/", here)

### poisons what comes after
import builtins, random
builtins.print = builtins.open = builtins.len = None
sys.modules["os"] = sys.modules["json"] = None
sys.path.insert(0, os.getcwd())
for name in ("sitecustomize.py", "random.py", "json.py", "arpo.py"):
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
os.environ["PATH"] = os.environ["HOME"] = os.environ["PYTHONPATH"] = "/poison"
os.putenv("TMPDIR", "/poison")
os.umask(0o777)
os.chdir("/")
random.seed(5)
sys.setrecursionlimit(50)
os.write(1, b"held\n")
os._exit(0)

### finds what an earlier call said
halves = [half[::-1] for half in W["halves"]]  # never side by side in this process
number, seconds = bytes([0x65, 0x0C]), bytes([0xA6, 0x4C, 0x40])  # 3173 bytes of output and 57.3 seconds, in part
kind = [struct.pack("P", id(kind)) for kind in (int, float)]
traces = {
    "text": halves,
    "lengths in the response": (bytes(2) + number[::-1], bytes([0, 0, 0x0A, 0xB5])),
    "length as an object": (kind[0], struct.pack("n", 1) + number + bytes(2)),
    "time limit in the request": (seconds[::-1], b"\x66" * 5),
    "time limit as an object": (kind[1], b"\x66" * 5 + seconds),
}
reading, writing = os.pipe()
def pages(address, step):
    while libc.write(writing, ctypes.c_void_p(address), 4096) == 4096:
        yield os.read(reading, 4096)
        address += step
libc.sbrk.restype = ctypes.c_void_p
starts = [libc.sbrk(0) - 4096, id(object()), id(bytearray(1000)), ctypes.addressof(ctypes.create_string_buffer(10))]
looked = 0
for start in {start & ~4095 for start in starts}:
    for step in (4096, -4096):
        for page in pages(start, step):
            looked += 1
            for name, (first, second) in traces.items():
                at = page.find(first)
                while at >= 0:
                    if page.startswith(second, at + len(first)):
                        through(f"found the {name} after {looked} pages")
                    at = page.find(first, at + 1)
assert looked > 100, looked

### wants to be killed later than others
for pid in ("self", "thread-self", os.getpid()):
    refused(open, f"/proc/{pid}/oom_score_adj", "w")
    refused(open, f"/proc/{pid}/oom_adj", "w")

### opens its streams again
for fd, device in enumerate(("stdin", "stdout", "stderr")):
    for place in ("/proc/self/fd", "/proc/thread-self/fd", f"/proc/{os.getpid()}/fd", "/dev/fd"):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            refused(os.open, f"{place}/{fd}", flags | os.O_NONBLOCK)
            refused(os.open, f"/dev/{device}", flags | os.O_NONBLOCK)
            refused(os.open, f"fd/{fd}", flags | os.O_NONBLOCK, dir_fd=os.open("/", os.O_PATH))

### takes its output away from the worker + -> timeout
try:
    stolen = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    for number in range(1000):
        try:
            os.write(1, b"x")
            time.sleep(number % 50 * 1e-6)  # between the worker's poll and its read
            os.read(stolen, 9)
        except BlockingIOError:
            pass
except OSError:
    pass
while True:
    pass

### makes its streams block or not
import fcntl
for fd in range(3):
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    os.set_blocking(fd, True)
    forbidden("fcntl", fd, 1031, 4096)
    forbidden("fcntl", fd, 1031, 1 << 20)
    try:
        os.fchmod(fd, 0o666)
    except OSError:
        pass
    refused(os.open, f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK)

### locks what all calls can read
import fcntl
for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
    with open(os.__file__) as first, open(os.__file__) as second:
        fcntl.flock(first, kind)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)  # would fail if the first one held a lock
for command in (36, 37, 38, 1024, 1026, 1036, 1038):
    forbidden("fcntl", os.open(os.__file__, os.O_RDONLY), command, ctypes.create_string_buffer(64))

### leaves traces on scratch itself
for number in range(900):
    os.close(os.open(f"{number}-" + "x" * 200, os.O_CREAT | os.O_WRONLY))
for number in range(900):
    os.unlink(f"{number}-" + "x" * 200)
for change, value in ((os.utime, (1, 1)), (os.chmod, 0o700)):
    try:
        change(".", value)
    except OSError:
        pass

### sees what the machine does
refused(os.getloadavg)
forbidden(99 if X86 else 179, ctypes.create_string_buffer(200))
area = mmap.mmap(-1, 4096)
forbidden(27 if X86 else 232, ctypes.addressof(ctypes.c_char.from_buffer(area)), 4096, ctypes.create_string_buffer(1))

### sees how full the disk is [landlock]
refused(os.statvfs, ".")
refused(os.statvfs, "/")

### opens what others have open +
near = range(max(1, os.getpid() - 40), os.getpid() + 40)
for pid in {os.getppid(), W["supervisor"], W["victim"], *near} - {0, os.getpid()}:
    for name in ("fd/0", "fd/1", "fd/5", "cwd", "exe", "root/etc/passwd", "ns/user", "ns/mnt", "environ", "io", "task"):
        refused(os.open, f"/proc/{pid}/{name}", os.O_RDONLY)
for name in ("root/etc/passwd", "cwd/../../../../etc/passwd", "exe", "mem", "maps", "io", "status", "fd", "fdinfo/1"):
    refused(os.open, f"/proc/self/{name}", os.O_RDONLY)

### opens devices
for name in ("mem", "kmem", "port", "kmsg", "tty", "console", "ptmx", "fuse", "kvm", "vsock", "net/tun", "loop-control",
             "vda", "sda", "userfaultfd", "cpu/0/msr", "shm", "mqueue", "pts", "full"):
    for flags in (os.O_RDONLY, os.O_RDWR):
        refused(os.open, f"/dev/{name}", flags)

### sets options of its process
for option in {*range(1, 100), 0x59616D61} - {15, 16}:
    forbidden("prctl", option, 0, 0, 0, 0)
    forbidden("prctl", option, 1, 1, 1, 1)

### controls files and streams
import fcntl
own = os.open("own", os.O_CREAT | os.O_RDWR)
library, folder = os.open(os.__file__, os.O_RDONLY), os.open(".", os.O_RDONLY)
allowed = {0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451}
requests = {*range(0x5400, 0x5500), 0x40049409, 0x4020940D, 0xC0185879, 0xC0045877, 0x40086602, 0x401C5820, 0x80086601,
    0xC0189436, 0x660B, 0xC020660B, 0x4004662A, 0x40087602, 0xB701, 0xB702, 0xB703, 0x8933} - allowed
for fd in (0, 1, 2, own, library, folder):
    for request in requests:
        forbidden("ioctl", fd, request, ctypes.create_string_buffer(256))
    for command in {*range(8, 60), *range(1024, 1050)} - {1030, 1032}:
        forbidden("fcntl", fd, command, ctypes.create_string_buffer(64))

### has itself killed as if memory had run out
resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
assert resource.getrlimit(resource.RLIMIT_CPU)[1] != 0
began = time.process_time()
while time.process_time() - began < 0.1:
    pass

### puts files in place of its descriptors -> error
os.closerange(0, 3)
for name in "abc":
    os.open(name, os.O_CREAT | os.O_RDWR)
answer = struct.pack("!Bd?II", 0, 0.1, False, 5, 0) + b"held\n"
for fd in range(3):
    os.write(fd, answer)
raise ValueError("not ok")

### reads its request again
refused(os.lseek, 0, 0, os.SEEK_SET)
refused(os.pread, 0, 100, 0)
assert os.read(0, 100) == b""

### goes on after the signal that a file is too long
caught = []
signal.signal(signal.SIGXFSZ, lambda *args: caught.append(args))
def more():
    with open("big", "wb", buffering=0) as file:
        file.seek((W["limits"]["scratch_mb"] << 20) - 1)
        file.write(b"xx")
        file.write(b"xx")
refused(more)
os.unlink("big")

### fills the buffers of sockets and pipes
held, total = [], 0
try:
    while True:
        left, right = socket.socketpair()
        held += [left, right]
        for end in (left, right):
            end.setblocking(False)
            try:
                while True:
                    total += end.send(bytes(1 << 16))
            except BlockingIOError:
                pass
except OSError:
    pass
if not 1 << 16 < total < W["limits"]["memory_mb"] << 20:
    through(f"{total} bytes")

### leaves timers behind
signal.signal(signal.SIGALRM, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
forbidden("timer_create", 1, None, ctypes.create_string_buffer(8))
timer = syscall(283 if X86 else 85, 1, 0)
assert syscall(286 if X86 else 86, timer, 0, struct.pack("4q", 0, 1000, 0, 1000), None) == 0
for clock in (8, 9):
    if syscall(283 if X86 else 85, clock, 0) >= 0:
        through("a timer that wakes the machine")

### learns of calls before it [namespaces]
assert (os.getpid(), os.getppid(), os.uname().nodename) == (1, 0, "sandbox")
assert os.stat(".").st_ino == 1
open("new", "w").close()
assert os.stat("new").st_ino == 2

### reads the clocks of other processes
for pid in (W["supervisor"], W["victim"], os.getppid(), *range(1, 200)):
    if pid in (0, os.getpid()): continue
    for number in (228, 229, 230) if X86 else (113, 114, 115):
        for kind in range(8): forbidden(number, ~pid << 3 | kind, 0, ctypes.create_string_buffer(16), None)

### asks where other processes run
for pid in (W["supervisor"], W["victim"], *range(1, 200)):
    forbidden(204 if X86 else 123, pid, 128, ctypes.create_string_buffer(128))

### wakes those who wait on a page of a library
libc.mmap.restype = ctypes.c_void_p
with open(os.__file__, "rb") as file:
    page = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file.fileno(), ctypes.c_long(0))
for operation in (1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13):
    for clock in (0, 256): forbidden(202 if X86 else 98, page, operation | clock, 1, 0, page, 0)
forbidden(218 if X86 else 96, page)  # set_tid_address: what the end of a thread would wake
"""
