"""Scripts by which one branch of a Python session attacks another, as data; how they are judged is in `attack_arena`.

Above each stands `### name [tier] [-> how it must end]`. What is above `---` is a call on the prefix that both branches
share, what is below the call of one branch. LOOK must show the same in the other branches afterwards.
"""

START = """
x = [1]
with open("kept", "w") as file: file.write("kept")
os.mkdir("folder")
with open("folder/inner", "w") as file: file.write("inner")
def loop_of():
    frame = sys._getframe()
    while frame.f_code.co_name != "serve_session":
        frame = frame.f_back
    return frame.f_locals["libc"]
def value_of(number):
    return getattr(number, "value", number)
CLOCKS = (228, 229, 230) if X86 else (113, 114, 115)
PAUSE, CLONE, FORK = (124, 56, 0x8011) if X86 else (156, 220, 0x8011)
"""
LOOK = """
print(x, sorted(os.walk(os.environ["HOME"])), open(os.path.join(os.environ["HOME"], "kept")).read(), open(
    os.path.join(os.environ["HOME"], "folder/inner")).read()) if os.environ["HOME"] == "/tmp" else print(
    x, sorted(os.listdir()), open("kept").read(), open("folder/inner").read())
"""

BRANCH_SCRIPTS = r"""
### changes what it has
x.append(2)
del os.environ["HOME"]
with open("kept", "r+") as file: file.write("KEPT")
with open("folder/inner", "a") as file: file.write("more")
with open("new", "w") as file: file.write("new")
os.rename("folder", "other")
os.unlink("kept")
print("held")

### writes where the frozen process is [namespaces] -> held killed
os.chdir = lambda *path: None
---
for change in (lambda: open("kept", "r+"), lambda: open("new", "w"), lambda: os.mkdir("new"), lambda: os.unlink("kept"),
               lambda: os.chmod("kept", 0), lambda: os.utime("kept"), lambda: os.rename("kept", "kept2")):
    refused(change)
print("held")

### writes above where the frozen process is [namespaces] -> held killed
os.chdir("folder")
os.chdir = lambda *path: None
---
for change in (lambda: open("inner", "r+"), lambda: open("../kept", "r+"), lambda: open("../new", "w")):
    refused(change)
print("held")

### changes a file that the frozen process has mapped [namespaces] -> held refused
with open("kept", "rb") as file:
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file.fileno(), ctypes.c_long(0))
class Seen:
    def __repr__(self): return repr([1]) if ctypes.string_at(at, 4) == b"kept" else "changed"
x = Seen()
---
with open("kept", "r+b") as file: file.write(b"KEPT")
with open("kept", "r+b") as file: file.truncate(2)
print("held")

### shares memory
for kind in (1, 3, 4, 8, 0x21, 0x23, 0x28, 0x20):
    forbidden(9 if X86 else 222, 0, 4096, 3, kind, -1, 0)
zero = os.open("/dev/zero", os.O_RDONLY)
forbidden(9 if X86 else 222, 0, 4096, 1, 1, zero, 0)
with open("kept", "r+b") as file:
    forbidden(9 if X86 else 222, 0, 4, 3, 1, file.fileno(), 0)
os.close(zero)
for name in ("shmget", "semget", "msgget"):
    forbidden(name, 0x6172706F, 4096, 0o1666)
forbidden("memfd_create", b"arpo", 0)
refused(mmap.mmap, -1, 4096)
print("held")

### forks by the clone of its session
for attempt in range(100):
    forbidden("clone", FORK, 0, 0, 0, 0)
for flags in (17, 0x8000, 0x8000 | 9, 0x8000 | 17 | 0x100, 0x8000 | 17 | 0x4000, 0x1200000 | 17, 0x8000 | 17 | 0x10000):
    forbidden("clone", flags, 0, 0, 0, 0) if flags != 0x18011 else None
print("held")

### asks to fork without end [namespaces]
def ask():
    for attempt in range(2000):
        if syscall("clone", FORK, 0, 0, 0, 0) != -errno.EPERM:
            through("clone")
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("held")

### forks more than once when it is told to [namespaces] -> held killed
real, forked = loop_of().syscall, []
def evil(number, *args):
    if value_of(number) == CLONE:
        pid = real(number, *args)
        if pid != 0:
            for attempt in range(50):
                forked.append(real(number, *args))
                if forked[-1] == 0: os._exit(0)
                if forked[-1] > 0: x.append("forked again")  # the next branch will see it
        else:
            forked.append(real(number, *args))
        return pid
    return real(number, *args)
loop_of().syscall = evil
---
assert not [pid for pid in forked if pid >= 0], forked
print("held")

### forks before it is told to [namespaces] -> held killed
forked = []
for attempt in range(50):
    forked.append(loop_of().syscall(ctypes.c_long(CLONE), ctypes.c_long(FORK), *[ctypes.c_long(0)] * 4))
---
assert not [pid for pid in forked if pid >= 0], forked
print("held")

### hides the process that it may fork [namespaces] -> killed timeout
real = loop_of().syscall
def evil(number, *args):
    found = real(number, *args)
    if value_of(number) == CLONE and found == 0:
        while True: time.sleep(1)
    return found
loop_of().syscall = evil
---
through("it ran")

### lets its fork run and hides itself [namespaces] -> killed timeout
real = loop_of().syscall
def evil(number, *args):
    found = real(number, *args)
    if value_of(number) == CLONE and found > 0:
        while True: time.sleep(1)
    return found
loop_of().syscall = evil
---
through("it ran")

### does not fork when it is told to [namespaces] -> killed
real = loop_of().syscall
def evil(number, *args):
    return real(number, *args) if value_of(number) == PAUSE else 1
loop_of().syscall = evil
---
through("it ran")

### runs the code itself instead of a fork [namespaces] -> killed timeout
real = loop_of().syscall
def evil(number, *args):
    if value_of(number) == CLONE: return 0
    return real(number, *args)
loop_of().syscall = evil
---
through("it ran")

### has a thread when it forks [namespaces] -> killed
real = loop_of().syscall
def evil(number, *args):
    if value_of(number) == CLONE:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return real(number, *args)
loop_of().syscall = evil
---
through("it ran")

### its fork has a thread before it gets its code [namespaces] -> killed
real = loop_of().syscall
def evil(number, *args):
    found = real(number, *args)
    if value_of(number) == CLONE and found == 0:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return found
loop_of().syscall = evil
---
through("it ran")

### keeps a pipe over the fork [namespaces] -> killed
real = loop_of().syscall
def evil(number, *args):
    if value_of(number) == CLONE: os.pipe()
    return real(number, *args)
loop_of().syscall = evil
---
through("it ran")

### keeps a pipe in place of its streams [namespaces] -> held killed
real = loop_of().syscall
def evil(number, *args):
    if value_of(number) == CLONE:
        reading, writing = os.pipe()
        os.write(writing, b"for the next branch")
        os.dup2(reading, 0), os.dup2(writing, 1), os.dup2(writing, 2)
        os.close(reading), os.close(writing)
    return real(number, *args)
loop_of().syscall = evil
---
assert os.read(0, 100) == b""
refused(os.read, 1, 1)
refused(os.write, 0, b"x")
print("held")

### looks at the scratch of its fork [namespaces] -> held killed
real, home = loop_of().syscall, os.environ["HOME"]
def look():
    try:
        os.chdir(home)
        held = os.open(os.path.join(home, "channel"), os.O_CREAT | os.O_RDONLY)
        os.dup2(held, 0)
        os.close(held)
        x.append("has a file of the fork")
    except OSError:
        pass
    if os.listdir(home): x.append("saw scratch")
def evil(number, *args):
    if value_of(number) == CLONE: look()
    return real(number, *args)
loop_of().syscall = evil
---
with open("channel", "w") as file: file.write("for the next branch")
print("held")

### looks at the scratch of its fork after that [namespaces] -> held killed
real, home = loop_of().syscall, os.environ["HOME"]
def evil(number, *args):
    found = real(number, *args)
    if value_of(number) == CLONE and os.listdir(home): x.append("saw scratch")
    return found
loop_of().syscall = evil
---
print("held")

### leaves flags on what it shares with its parent [namespaces] -> held killed
import fcntl
real = loop_of().syscall
def evil(number, *args):
    if value_of(number) == CLONE:
        if any(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK for fd in range(3)): x.append("saw flags")
    found = real(number, *args)
    if value_of(number) == CLONE and found > 0:
        for fd in range(3): fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    return found
loop_of().syscall = evil
---
print("held")

### leaves a pipe in place of its streams -> refused held
reading, writing = os.pipe()
out = os.dup(1)
os.dup2(reading, 0), os.dup2(writing, 2)
os.close(reading), os.close(writing)
os.write(out, b"held\n")
os.close(out)

### leaves open what others could use -> refused
import select
held = [os.pipe(), socket.socketpair(), select.epoll(), os.open(".", os.O_RDONLY), os.open("kept", os.O_RDWR)]

### leaves its old output open -> refused
held = os.dup(1)

### leaves a directory open -> refused
held = os.open(".", os.O_PATH)

### leaves a thread that goes on [namespaces] -> refused
def go_on():
    while True:
        try:
            with open("kept", "a") as file: file.write("x")
            x.append(2)
            time.sleep(0.001)
        except BaseException:
            pass
threading.Thread(target=go_on, daemon=True).start()

### leaves a thread that Python does not know [namespaces] -> refused
import _thread
_thread.start_new_thread(time.sleep, (600,))

### leaves a timer
forbidden(38 if X86 else 103, 0, struct.pack("4q", 0, 1000, 0, 1000), None)
if X86: forbidden(37, 1)
forbidden("timer_create", 1, None, ctypes.create_string_buffer(8))
refused(signal.setitimer, signal.ITIMER_REAL, 0.001, 0.001)
print("held")

### says that it has ended while it runs -> ok killed
syscall(PAUSE, 0)
while True: time.sleep(1)

### answers with a thread of its own [namespaces]
found = []
def answer():
    for status in (0, 1, 2, 255): found.append(syscall(PAUSE, status))
thread = threading.Thread(target=answer)
thread.start()
thread.join()
assert found == [-errno.EPERM] * 4, found
print("held")

### goes on from a call that it has ended itself [namespaces] -> killed
order = syscall(PAUSE, 0)
while True:
    order = syscall(PAUSE, 0)
---
through("it ran")

### signals its relatives
for pid in range(-3, 300):
    for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
        forbidden("kill", pid, number)
        forbidden("tgkill", pid, pid, number)
    forbidden("pidfd_open", pid, 0)
print("held")

### reads and traces its relatives
local = ctypes.create_string_buffer(64)
mine = struct.pack("PN", ctypes.addressof(local), 64)
theirs = struct.pack("PN", id(x), 64)
for pid in range(1, 60):
    forbidden("process_vm_readv", pid, mine, 1, theirs, 1, 0)
    forbidden("process_vm_writev", pid, mine, 1, theirs, 1, 0)
    forbidden("ptrace", 16, pid, 0, 0)
    forbidden("ptrace", 0x4206, pid, 0, 0)
    forbidden("kcmp", pid, os.getpid(), 0, 0, 0)
    for name in ("mem", "fd/0", "fd/1", "cwd/kept", "root/tmp/kept", "maps", "environ"):
        refused(os.open, f"/proc/{pid}/{name}", os.O_RDONLY)
print("held")

### takes the limits of its relatives
for pid in range(1, 60):
    if pid != os.getpid():
        forbidden("prlimit64", pid, resource.RLIMIT_NPROC, struct.pack("QQ", 0, 0), None)
print("held")

### lowers its limits so that it cannot fork
for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE): resource.setrlimit(kind, (0, 0))
---
print("held")

### reads the clocks of its relatives
for pid in range(1, 300):
    for kind in range(8):
        for name in CLOCKS: forbidden(name, ~pid << 3 | kind, 0, ctypes.create_string_buffer(16), None)
print("held")

### asks where its relatives run
for pid in range(1, 300): forbidden(204 if X86 else 123, pid, 128, ctypes.create_string_buffer(128))
print("held")

### counts its relatives by the threads that it can have [namespaces]
def count():
    ready, made = threading.Event(), []
    threading.stack_size(1 << 16)
    try:
        while True:
            made.append(threading.Thread(target=ready.wait))
            made[-1].start()
    except RuntimeError:
        ready.set()
    for thread in made[:-1]: thread.join()
    return len(made)
first = count()
---
if count() != first: through(f"{count()} threads instead of {first}")
print("held")

### ends its first thread and goes on in another [namespaces] -> timeout
def go_on():
    while True: syscall(PAUSE, 0)
threading.Thread(target=go_on, daemon=True).start()
syscall(60 if X86 else 93, 0)

### keeps memory from its fork [namespaces] -> killed
for line in (id(x), id(sys.modules), id(os.environ)):
    assert libc.madvise(ctypes.c_void_p(line & -4096), ctypes.c_size_t(4096), 10) == 0
---
through("it ran")

### has its end wake others
forbidden(218 if X86 else 96, id(x))
print("held")

### leaves files with paths that are too long
for number in range(40):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
with open("first", "w") as file: file.write("linked")
os.link("first", "second")
---
for number in range(40): os.chdir("d" * 250)
assert os.stat("second").st_nlink == 2
assert open("second").read() == "linked"
print("held")

### leaves files with odd times [namespaces]
for number, seconds in enumerate((-(1 << 62), -1, 0, 1 << 33, 1 << 62)):
    with open(f"time{number}", "w") as file: pass
    try: os.utime(f"time{number}", (seconds, seconds))
    except OverflowError: pass
---
assert os.stat("time1").st_mtime == -1
print("held")

### leaves a directory that it has removed [namespaces] -> refused
os.chdir("folder")
os.unlink("inner")
os.rmdir("../folder")
os.chdir = None

### bombs with threads and stops [namespaces]
ready, made = threading.Event(), []
threading.stack_size(1 << 16)
try:
    for number in range(1000):
        made.append(threading.Thread(target=ready.wait, args=(60,)))
        made[-1].start()
except RuntimeError:
    pass
else:
    through("1000 threads")
ready.set()
for thread in made[:-1]: thread.join()
print("held")

### bombs with threads and does not stop [namespaces] -> timeout
threading.stack_size(1 << 16)
try:
    while True: threading.Thread(target=time.sleep, args=(600,)).start()
except RuntimeError:
    pass
while True: pass

### fills its scratch -> held killed
try:
    with open("big", "wb", buffering=0) as file:
        while True: file.write(bytes(1 << 16))
except OSError:
    pass
print("held")

### fills its memory -> memory
held = []
while True: held.append(bytearray(1 << 20))

### ends its process -> killed
os._exit(0)

### aborts -> killed
libc.abort()

### floods its output -> killed
while True: os.write(1, b"x" * 65536)

### forges an answer
answer = struct.pack("!Bd?II", 0, 0.1, False, 5, 0) + b"held\n"
for fd in (0, *range(3, 128)):
    try: os.write(fd, answer)
    except OSError: pass
print("held")

### finds the way by which its session asks
for fd in range(3, 1024):
    try: os.fstat(fd)
    except OSError: continue
    through(f"descriptor {fd} is open")
for request in (0xC0502100, 0xC0182101, 0x40082102, 0x40182103):
    for fd in range(3): forbidden("ioctl", fd, request, ctypes.create_string_buffer(80))
print("held")

### changes how the interpreter goes on -> held killed error
import builtins, gc
gc.collect = os.getcwd = threading.enumerate = sys.stdout.flush = None
builtins.print = builtins.open = None
sys.modules["__main__"] = None
---
os.write(1, b"held\n")

### leaves folders that are too deep to copy -> refused killed
for number in range(200):
    os.mkdir("d")
    os.chdir("d")

### leaves links that lead out
for number in range(20):
    os.symlink(W["shared"], f"out{number}")
    os.symlink(W["canary"], f"canary{number}")
os.symlink(".", "itself")
---
for name in ("out0/kept", "canary0"):
    refused(open, name)
    refused(open, name, "w")
print("held")

### leaves odd files [namespaces]
os.umask(0o777)
os.mkdir("shut", 0)
os.close(os.open("secret", os.O_CREAT | os.O_WRONLY, 0))
for number in range(1, 256):
    if number not in (0x2E, 0x2F): os.close(os.open(bytes([number, 120]), os.O_CREAT | os.O_WRONLY, 0))
---
assert len(os.listdir()) == 4 + 253, len(os.listdir())
assert oct(os.stat("shut").st_mode) == "0o40000", oct(os.stat("shut").st_mode)
print("held")
"""
