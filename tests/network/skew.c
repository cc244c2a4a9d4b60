/* Shifts the wall clock of one process: CLOCK_REALTIME is shifted by the nanoseconds in the file TENAX_LAB_CLOCK, which
   may change at any time. The monotonic clock and the times of files are not affected. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift_ns;

__attribute__((constructor)) static void find_shift(void) {
    const char *path = getenv("TENAX_LAB_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *shift_ns, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift_ns = page;
    close(file);
}

static void move(struct timespec *t, int64_t by_ns) {
    int64_t ns = t->tv_nsec + by_ns % 1000000000;
    t->tv_sec += by_ns / 1000000000 + (ns >= 1000000000) - (ns < 0);
    t->tv_nsec = (ns + 1000000000) % 1000000000;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int result = (int)syscall(SYS_clock_gettime, clock, t);
    if (result == 0 && shift_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) move(t, *shift_ns);
    return result;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
    struct timespec t;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = t.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}

/* Waits until a moment that the caller took from the shifted clock, while the kernel reads the true one. */
int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    int (*real)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec t = *until;
    if (shift_ns) move(&t, -*shift_ns);
    return real(semaphore, &t);
}
