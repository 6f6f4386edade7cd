/* Preloaded, gives a process another date: later by the seconds in DATE_OFFSET_S (earlier where that is negative).
 *
 * Functions that wait until a date take one of the process's own, so the kernel is given the true one. Clocks that do
 * not tell the date, such as CLOCK_MONOTONIC, stay as they are. */

#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t offset_s(void) {
    const char *text = getenv("DATE_OFFSET_S");
    return text ? atoll(text) : 0;
}

/* A time of CLOCK_MONOTONIC is the time since the machine has started. */
static int is_date(const struct timespec *t) { return t->tv_sec > 1000000000; }

static clockid_t clock_of(const struct timespec *t) { return is_date(t) ? CLOCK_REALTIME : CLOCK_MONOTONIC; }

static struct timespec true_time(const struct timespec *t) {
    struct timespec result = *t;
    if (is_date(t)) result.tv_sec -= offset_s();
    return result;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int error = (int)syscall(SYS_clock_gettime, clock, t);
    if (!error && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += offset_s();
    return error;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict t) {
    struct timespec until = true_time(t);
    return pthread_cond_clockwait(c, m, clock_of(t), &until);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict t) {
    struct timespec until = true_time(t);
    return sem_clockwait(s, CLOCK_REALTIME, &until);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict t) {
    struct timespec until = true_time(t);
    return pthread_mutex_clocklock(m, CLOCK_REALTIME, &until);
}
