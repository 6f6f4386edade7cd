// A stand-in for libcuda.so.1: streams of several devices that process queues, and graphs for capture and replay.
//
// It has only the driver functions that marks need. Tests launch work through stub_… functions: kernels that only take
// time, events, and stores into host memory. Streams run asynchronously on their own threads. Kernels take their nominal
// time, or run on a GPU of stub_nvml.c (stub_use_gpu): slower at a locked clock, with a power that its counter counts.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { WRITE, FILL, DELAY, WAIT, EVENT, STORE };

typedef struct Work {
    int kind;
    void *where;
    uint64_t value;
    size_t words;
    double seconds;
    struct Work *next;
} Work;

typedef struct { Work *first, **last; } Queue;

typedef struct {
    int device, is_busy;
    Queue queue, *captured;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} Stream;

static __thread int current_device = -1;
static int fail_register, fail_write;
static const volatile uint32_t *gpu_clock_mhz; /* 0: not locked */
static volatile double *gpu_counted_j;
static double gpu_top_mhz, gpu_power_w, gpu_period_s, uncounted_j;
static long counted_periods;
static char *registered;
static size_t registered_length;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void append(Queue *queue, Work work) {
    Work *copy = malloc(sizeof work);
    *copy = work;
    copy->next = NULL;
    *queue->last = copy;
    queue->last = &copy->next;
}

static void sleep_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

// Runs a kernel of this duration at the top clock. At a lower one it takes longer, at a power that falls with its cube.
// The counter changes only from one of its periods to the next, as that of stub_nvml.c does.
static void run_on_gpu(double seconds) {
    double last_s = now_s();
    while (seconds > 0) {
        double speed = *gpu_clock_mhz ? *gpu_clock_mhz / gpu_top_mhz : 1, slice_s = seconds / speed;
        sleep_s(slice_s < 0.001 ? slice_s : 0.001);
        double passed_s = now_s() - last_s;
        last_s += passed_s;
        seconds -= passed_s * speed;
        uncounted_j += passed_s * gpu_power_w * speed * speed * speed;
        if (counted_periods != (long)(last_s / gpu_period_s)) {
            counted_periods = (long)(last_s / gpu_period_s);
            *gpu_counted_j += uncounted_j;
            uncounted_j = 0;
        }
    }
}

static void execute(const Work *work) {
    if (work->kind == DELAY) {
        gpu_clock_mhz ? run_on_gpu(work->seconds) : sleep_s(work->seconds);
    } else if (work->kind == WAIT) {
        while (!*(volatile int64_t *)work->where) nanosleep(&(struct timespec){0, 1000000}, NULL);
    } else if (work->kind == EVENT) {
        *(double *)work->where = now_s();
    } else if (work->kind == STORE) {
        *(volatile int64_t *)work->where = (int64_t)work->value;
    } else {
        for (size_t word = 0; word < work->words; word++)
            __atomic_store_n((uint32_t *)work->where + word, (uint32_t)work->value, __ATOMIC_SEQ_CST);
    }
}

static void *run(void *argument) {
    Stream *stream = argument;
    for (;;) {
        pthread_mutex_lock(&stream->mutex);
        stream->is_busy = 0;
        pthread_cond_broadcast(&stream->changed);
        while (!stream->queue.first) pthread_cond_wait(&stream->changed, &stream->mutex);
        Work *work = stream->queue.first;
        if (!(stream->queue.first = work->next)) stream->queue.last = &stream->queue.first;
        stream->is_busy = 1;
        pthread_mutex_unlock(&stream->mutex);
        execute(work);
        free(work);
    }
    return NULL;
}

// Adds work to the stream's queue, or to the graph being captured on the stream.
static int issue(Stream *stream, Work work) {
    if (current_device < 0) return INVALID_CONTEXT;
    if (!stream || stream->device != current_device) return INVALID_HANDLE;
    pthread_mutex_lock(&stream->mutex);
    append(stream->captured ? stream->captured : &stream->queue, work);
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
    return SUCCESS;
}

static int is_registered(uint64_t address, size_t length) {
    return address >= (uint64_t)registered && address + length <= (uint64_t)registered + registered_length;
}

int cuMemHostRegister_v2(void *address, size_t length, unsigned flags) {
    if (current_device < 0) return INVALID_CONTEXT;
    if (fail_register) return fail_register;
    if (flags != 3) return INVALID_VALUE; // portable and mapped
    registered = address;
    registered_length = length;
    return SUCCESS;
}

int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *address, unsigned flags) {
    if (flags || !is_registered((uint64_t)address, 1)) return INVALID_VALUE;
    *pointer = (uint64_t)address;
    return SUCCESS;
}

int cuStreamWriteValue32_v2(Stream *stream, uint64_t address, uint32_t value, unsigned flags) {
    if (fail_write) return fail_write;
    if (flags || address % 4 || !is_registered(address, 4)) return INVALID_VALUE;
    return issue(stream, (Work){.kind = WRITE, .where = (void *)address, .value = value, .words = 1});
}

int cuMemsetD32Async(uint64_t address, uint32_t value, size_t words, Stream *stream) {
    if (!is_registered(address, 4 * words)) return INVALID_VALUE;
    return issue(stream, (Work){.kind = FILL, .where = (void *)address, .value = value, .words = words});
}

int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : error == OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : error == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
            : error == 801             ? "CUDA_ERROR_NOT_SUPPORTED"
                                       : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

void stub_set_device(int device) { current_device = device; }

void stub_fail(int on_register, int on_write) {
    fail_register = on_register;
    fail_write = on_write;
}

void stub_use_gpu(const uint32_t *clock_mhz, double *counted_j, double top_mhz, double power_w, double period_s) {
    gpu_top_mhz = top_mhz;
    gpu_power_w = power_w;
    gpu_period_s = period_s;
    gpu_counted_j = counted_j;
    gpu_clock_mhz = clock_mhz;
}

Stream *stub_stream(int device) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_t thread;
    stream->device = device;
    stream->queue.last = &stream->queue.first;
    pthread_mutex_init(&stream->mutex, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&thread, NULL, run, stream);
    pthread_detach(thread);
    return stream;
}

int stub_delay(Stream *stream, double seconds) { return issue(stream, (Work){.kind = DELAY, .seconds = seconds}); }

int stub_wait(Stream *stream, int64_t *where) { return issue(stream, (Work){.kind = WAIT, .where = where}); }

int stub_event(Stream *stream, double *at_s) { return issue(stream, (Work){.kind = EVENT, .where = at_s}); }

int stub_store(Stream *stream, int64_t *where, int64_t value) {
    return issue(stream, (Work){.kind = STORE, .where = where, .value = (uint64_t)value});
}

void stub_synchronize(Stream *stream) {
    pthread_mutex_lock(&stream->mutex);
    while (stream->queue.first || stream->is_busy) pthread_cond_wait(&stream->changed, &stream->mutex);
    pthread_mutex_unlock(&stream->mutex);
}

void stub_capture_begin(Stream *stream) {
    stream->captured = calloc(1, sizeof(Queue));
    stream->captured->last = &stream->captured->first;
}

Queue *stub_capture_end(Stream *stream) {
    Queue *graph = stream->captured;
    stream->captured = NULL;
    return graph;
}

int stub_replay(Queue *graph, Stream *stream) {
    int status = SUCCESS;
    for (Work *work = graph->first; work && !status; work = work->next) status = issue(stream, *work);
    return status;
}
