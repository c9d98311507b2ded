// Functions of libc that change files, for `mod.rs`: one change within a folder ends the process,
// or fails as on a full disk.
//
//   DISTMUON_TEST_FOLDER     the folder; changes elsewhere do not count
//   DISTMUON_TEST_KILLED_AT  the number of the change before which the process is killed
//   DISTMUON_TEST_FAILS_AT   the number of the change that fails
//
// At its end, the process prints the number of changes.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *folder;
static long killed_at, fails_at;
static atomic_long changes;

static long number(const char *variable) {
    const char *text = getenv(variable);
    return text ? atol(text) : 0;
}

__attribute__((constructor)) static void begin(void) {
    folder = getenv("DISTMUON_TEST_FOLDER");
    killed_at = number("DISTMUON_TEST_KILLED_AT");
    fails_at = number("DISTMUON_TEST_FAILS_AT");
}

__attribute__((destructor)) static void end(void) {
    if (folder) dprintf(STDERR_FILENO, "changes of files: %ld\n", (long)changes);
}

static int is_within(const char *path) {
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_open_within(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return is_within(path);
}

// Returns 1 if this change is to fail.
static int fails(int counts) {
    if (!counts) return 0;
    long change = ++changes;
    if (change == killed_at) {
        kill(getpid(), SIGKILL);
        pause();
    }
    if (change != fails_at) return 0;
    errno = ENOSPC;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opens_for_changes(int flags) { return (flags & (O_CREAT | O_TRUNC)) != 0; }

#define OPEN(name)                                                              \
    int name(const char *path, int flags, ...) {                                \
        va_list arguments;                                                      \
        va_start(arguments, flags);                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
        va_end(arguments);                                                      \
        if (fails(opens_for_changes(flags) && is_within(path))) return -1;      \
        return NEXT(name)(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *bytes, size_t count) {
    return fails(is_open_within(file)) ? -1 : NEXT(write)(file, bytes, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    return fails(is_open_within(file)) ? -1 : NEXT(writev)(file, parts, count);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t offset) {
    return fails(is_open_within(file)) ? -1 : NEXT(pwrite64)(file, bytes, count, offset);
}

int ftruncate64(int file, off64_t length) {
    return fails(is_open_within(file)) ? -1 : NEXT(ftruncate64)(file, length);
}

int fsync(int file) { return fails(is_open_within(file)) ? -1 : NEXT(fsync)(file); }

int fdatasync(int file) { return fails(is_open_within(file)) ? -1 : NEXT(fdatasync)(file); }

int rename(const char *from, const char *to) {
    return fails(is_within(to)) ? -1 : NEXT(rename)(from, to);
}

int link(const char *from, const char *to) {
    return fails(is_within(to)) ? -1 : NEXT(link)(from, to);
}

int unlink(const char *path) { return fails(is_within(path)) ? -1 : NEXT(unlink)(path); }

int unlinkat(int in, const char *path, int flags) {
    return fails(is_within(path) || is_open_within(in)) ? -1 : NEXT(unlinkat)(in, path, flags);
}

int rmdir(const char *path) { return fails(is_within(path)) ? -1 : NEXT(rmdir)(path); }

int mkdir(const char *path, mode_t mode) {
    return fails(is_within(path)) ? -1 : NEXT(mkdir)(path, mode);
}
