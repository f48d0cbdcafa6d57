// Fails some calls that take memory which processes share, as a system that commits no more memory than it has.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int count, first, last = -1;

// Fails the calls with these numbers from now on, counted from 1. Returns how many came before.
int fail_shared_memory(int from, int to) {
    const int before = count;
    count = 0, first = from, last = to;
    return before;
}

static int fails(void) {
    const int number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
    return first <= number && number <= last;
}

#define PLAIN(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t offset) {
    if ((flags & MAP_SHARED) && descriptor >= 0 && fails())
        return errno = ENOMEM, MAP_FAILED;
    return PLAIN(mmap)(address, size, protection, flags, descriptor, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t offset) {
    return mmap(address, size, protection, flags, descriptor, offset);
}
int ftruncate(int descriptor, off_t size) { return fails() ? (errno = ENOMEM, -1) : PLAIN(ftruncate)(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { return ftruncate(descriptor, size); }
int posix_fallocate(int descriptor, off_t offset, off_t size) {
    return fails() ? ENOMEM : PLAIN(posix_fallocate)(descriptor, offset, size);
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t size) { return posix_fallocate(descriptor, offset, size); }
int madvise(void *address, size_t size, int advice) {
    if (advice == 23 && fails()) // MADV_POPULATE_WRITE
        return errno = ENOMEM, -1;
    return PLAIN(madvise)(address, size, advice);
}
long syscall(long number, ...) {
    va_list given;
    va_start(given, number);
    long arguments[6];
    for (int i = 0; i < 6; ++i)
        arguments[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_memfd_create && fails())
        return errno = ENOMEM, -1;
    return PLAIN(syscall)(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}
