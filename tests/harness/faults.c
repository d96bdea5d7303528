/* For LD_PRELOAD: counts the calls that change files below some folders, in all processes of a tree together, and makes
 * one of them fail. What is to happen stands in a mapped file (EDGEFT_FAULTS), so that it can be changed at any time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    int64_t count;   /* calls so far */
    int64_t fail_at; /* the call that fails; 0: none */
    int64_t number;  /* its errno; -9: the whole tree is killed there instead */
    int64_t sticky;  /* all later ones fail, too */
    int64_t armed, trace, top; /* top: the tree's first process */
    char folders[2][512];
};

static struct control *control;
static char trace_file[1024];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("EDGEFT_FAULTS");
    int handle = path ? open(path, O_RDWR) : -1;
    if (handle < 0) return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (found != MAP_FAILED) control = found;
    snprintf(trace_file, sizeof trace_file, "%s.trace", path);
}

/* 0, or the errno with which this call is to fail */
static int fault(const char *kind, const char *path) {
    if (!control || !control->armed || !path) return 0;
    int below = 0;
    for (int i = 0; i < 2; i++) {
        size_t size = strlen(control->folders[i]);
        below |= size && !strncmp(path, control->folders[i], size);
    }
    if (!below) return 0;
    int64_t n = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (control->trace) {
        char line[1200];
        int size = snprintf(line, sizeof line, "%s %s\n", kind, path);
        int handle = syscall(SYS_openat, AT_FDCWD, trace_file, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (handle >= 0) {
            syscall(SYS_write, handle, line, size);
            close(handle);
        }
    }
    if (!control->fail_at || n < control->fail_at || (n > control->fail_at && !control->sticky)) return 0;
    if (control->number == -9) {
        kill(control->top, SIGKILL);
        kill(getpid(), SIGKILL);
    }
    return control->number;
}

static int fault_fd(const char *kind, int fd) {
    char link[64], path[1024];
    if (!control || !control->armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return fault(kind, path);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(call) do { int code_ = (call); if (code_) { errno = code_; return -1; } } while (0)
#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))

#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    if (CHANGES(flags)) FAIL(fault("open", path)); \
    REAL(name); return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) int name(int at, const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
    if (CHANGES(flags)) FAIL(fault("open", path)); \
    REAL(name); return real(at, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

/* half of the bytes get there: the worst that can be left behind */
ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    int code = fault_fd("write", fd);
    if (!code) return real(fd, data, size);
    if (size > 1) real(fd, data, size / 2);
    errno = code;
    return -1;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    FAIL(fault_fd("write", fd));
    REAL(writev);
    return real(fd, parts, count);
}

#define PWRITE(name, offset_t) ssize_t name(int fd, const void *data, size_t size, offset_t at) { \
    REAL(name); \
    int code = fault_fd("write", fd); \
    if (!code) return real(fd, data, size, at); \
    if (size > 1) real(fd, data, size / 2, at); \
    errno = code; \
    return -1; }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

int fsync(int fd) { FAIL(fault_fd("fsync", fd)); REAL(fsync); return real(fd); }
int fdatasync(int fd) { FAIL(fault_fd("fsync", fd)); REAL(fdatasync); return real(fd); }
int ftruncate(int fd, off_t size) { FAIL(fault_fd("truncate", fd)); REAL(ftruncate); return real(fd, size); }
int ftruncate64(int fd, off64_t size) { FAIL(fault_fd("truncate", fd)); REAL(ftruncate64); return real(fd, size); }

int posix_fallocate(int fd, off_t at, off_t size) {
    int code = fault_fd("allocate", fd);
    REAL(posix_fallocate);
    return code ? code : real(fd, at, size);
}

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    int code = fault_fd("allocate", fd);
    REAL(posix_fallocate64);
    return code ? code : real(fd, at, size);
}

int rename(const char *from, const char *to) { FAIL(fault("rename", to)); REAL(rename); return real(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    FAIL(fault("rename", to));
    REAL(renameat);
    return real(a, from, b, to);
}
int unlink(const char *path) { FAIL(fault("unlink", path)); REAL(unlink); return real(path); }
int unlinkat(int at, const char *path, int flags) { FAIL(fault("unlink", path)); REAL(unlinkat); return real(at, path, flags); }
int rmdir(const char *path) { FAIL(fault("unlink", path)); REAL(rmdir); return real(path); }
int mkdir(const char *path, mode_t mode) { FAIL(fault("mkdir", path)); REAL(mkdir); return real(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { FAIL(fault("mkdir", path)); REAL(mkdirat); return real(at, path, mode); }
int chmod(const char *path, mode_t mode) { FAIL(fault("chmod", path)); REAL(chmod); return real(path, mode); }
int utimensat(int at, const char *path, const struct timespec when[2], int flags) {
    FAIL(fault("touch", path));
    REAL(utimensat);
    return real(at, path, when, flags);
}
