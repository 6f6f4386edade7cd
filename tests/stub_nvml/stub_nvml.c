/* A stand-in for libnvidia-ml.so.1 for tests: the functions that pynvml calls, for GPUs in a shared file.
 *
 * The file named by PERSEUS_STUB_NVML holds one `struct state`, written by controller.py, whose
 * ctypes.Structure mirrors this one. Every process that maps it sees the same GPUs. */

#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 8
#define MAX_CLOCKS 128
#define HISTORY 4096
#define MAX_FIELDS 16
#define POWER_INSTANT 186

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9 };

enum function { INIT, SHUTDOWN, DRIVER_VERSION, COUNT, BY_INDEX, UUID, NAME, PCI_INFO, MEMORY_CLOCKS,
                GRAPHICS_CLOCKS, SET_LOCKED, RESET_LOCKED, CLOCK_INFO, ENERGY, POWER, REASONS, MIG_MODE,
                APPLICATION_CLOCK, DEFAULT_APPLICATION_CLOCK, POWER_LIMIT, DEFAULT_POWER_LIMIT, POWER_PROFILES,
                ENFORCED_POWER_LIMIT, FIELDS, C2C_MODE, POWER_STATE, TEMPERATURE, FUNCTIONS };

struct change {
    double at_s; /* CLOCK_MONOTONIC, or virtual */
    uint32_t clock_mhz; /* 0: reset */
};

struct field { /* an NVML field value */
    uint32_t id, scope;
    uint64_t value;
};

struct gpu {
    char uuid[80], name[96], bus_id[32];
    uint32_t clock_count, clocks_mhz[MAX_CLOCKS]; /* descending, as NVML lists them */
    uint32_t memory_clock_count, memory_clocks_mhz[4];
    uint32_t locked_clock_mhz; /* 0: not locked */
    uint32_t previous_clock_mhz; /* in effect until settled */
    uint32_t limit_clock_mhz; /* the clock stays below this one, as at a power limit; 0: no limit */
    uint32_t has_energy_counter, mig_enabled, application_clock_mhz, default_application_clock_mhz;
    uint32_t power_profiles[8]; /* a bit for each active profile */
    uint32_t field_count, counter_leaves_module_out;
    uint32_t locked_memory_clock_mhz; /* 0: not locked */
    uint32_t power_state; /* 8 for P8 */
    uint32_t temperature_c; /* 0: not reported */
    uint32_t has_processor, hides_gpu_power; /* on the same module; fields only report the power of the module */
    struct field fields[MAX_FIELDS];
    uint64_t throttle_reasons;
    double locked_at_s, settle_s, lock_latency_s, counter_period_s, power_w, power_limit_w, default_power_limit_w;
    double power_by_clock; /* share of power_w that is proportional to the clock */
    double enforced_power_limit_w; /* 0: power_limit_w */
    double average_power_w; /* the averaged reading; 0: the current power */
    double module_w; /* power of the module without the GPU */
    double counted_j, counted_until_s; /* the energy up to the last change of the clock */
    uint32_t calls[FUNCTIONS];
    int32_t errors[FUNCTIONS]; /* nvmlReturn_t to return; 0: success */
    uint32_t hang[FUNCTIONS]; /* blocks until this is 0 again */
    uint32_t change_count;
    struct change changes[HISTORY];
};

struct state {
    uint32_t gpu_count;
    char driver_version[76];
    double virtual_s; /* the time, if it is not 0; sleeping then advances it and returns immediately */
    uint32_t calls[FUNCTIONS];
    int32_t errors[FUNCTIONS];
    struct gpu gpus[MAX_GPUS];
};

static struct state *state;
static int users; /* nvmlInit counts its users, in each process */
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER; /* NVML may be started and stopped by many threads */

unsigned stubStateSize(void) { return sizeof(struct state); }

static double now_s(void) {
    struct timespec t;
    if (state->virtual_s) return state->virtual_s;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void sleep_s(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    if (state->virtual_s)
        state->virtual_s += seconds;
    else
        nanosleep(&t, NULL);
}

static int global_call(enum function f) {
    if (!users) return UNINITIALIZED;
    __atomic_fetch_add(&state->calls[f], 1, __ATOMIC_SEQ_CST);
    return state->errors[f];
}

static int call(struct gpu *gpu, enum function f) {
    if (!users) return UNINITIALIZED;
    if (!gpu) return INVALID_ARGUMENT;
    __atomic_fetch_add(&gpu->calls[f], 1, __ATOMIC_SEQ_CST);
    while (*(volatile uint32_t *)&gpu->hang[f]) usleep(10000);
    if (f == SET_LOCKED || f == RESET_LOCKED) sleep_s(gpu->lock_latency_s);
    return gpu->errors[f];
}

static uint32_t clock_mhz(struct gpu *gpu) {
    uint32_t wanted = now_s() < gpu->locked_at_s + gpu->settle_s ? gpu->previous_clock_mhz : gpu->locked_clock_mhz;
    if (!wanted) wanted = gpu->clocks_mhz[0];
    return gpu->limit_clock_mhz && gpu->limit_clock_mhz < wanted ? gpu->limit_clock_mhz : wanted;
}

static uint32_t memory_clock_mhz(struct gpu *gpu) {
    return gpu->locked_memory_clock_mhz ? gpu->locked_memory_clock_mhz : gpu->memory_clocks_mhz[0];
}

static double drawn_w(struct gpu *gpu) {
    return gpu->power_w * (1 - gpu->power_by_clock * (1 - (double)clock_mhz(gpu) / gpu->clocks_mhz[0]));
}

static double energy_j(struct gpu *gpu, double until_s) {
    return gpu->counted_j + (until_s > gpu->counted_until_s ? until_s - gpu->counted_until_s : 0) *
                                (drawn_w(gpu) + (gpu->counter_leaves_module_out ? 0 : gpu->module_w));
}

static void change_clock(struct gpu *gpu, uint32_t mhz) {
    if (gpu->power_by_clock) {
        gpu->counted_j = energy_j(gpu, now_s());
        gpu->counted_until_s = now_s();
    }
    uint32_t n = __atomic_fetch_add(&gpu->change_count, 1, __ATOMIC_SEQ_CST);
    gpu->changes[n % HISTORY] = (struct change){now_s(), mhz};
    gpu->previous_clock_mhz = clock_mhz(gpu);
    gpu->locked_at_s = now_s();
    gpu->locked_clock_mhz = mhz;
}

static int list(const uint32_t *from, unsigned n, unsigned *count, unsigned *to) {
    int fits = to && *count >= n;
    *count = n;
    if (!fits) return INSUFFICIENT_SIZE;
    memcpy(to, from, n * sizeof *to);
    return SUCCESS;
}

static int map_state(void) {
    const char *path = getenv("PERSEUS_STUB_NVML");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return DRIVER_NOT_LOADED;
    if (state) munmap(state, sizeof *state);
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (state != MAP_FAILED) return SUCCESS;
    state = NULL;
    return DRIVER_NOT_LOADED;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&starting);
    int error = users ? SUCCESS : map_state();
    if (!error) {
        __atomic_fetch_add(&state->calls[INIT], 1, __ATOMIC_SEQ_CST);
        error = state->errors[INIT];
    }
    if (!error) users++;
    pthread_mutex_unlock(&starting);
    return error;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    pthread_mutex_lock(&starting);
    int error = global_call(SHUTDOWN);
    if (!error) users--;
    pthread_mutex_unlock(&starting);
    return error;
}

const char *nvmlErrorString(int code) {
    static __thread char text[32];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    int error = global_call(DRIVER_VERSION);
    if (!error) snprintf(version, length, "%s", state->driver_version);
    return error;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int error = global_call(COUNT);
    if (!error) *count = state->gpu_count;
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    int error = global_call(BY_INDEX);
    if (error) return error;
    if (index >= state->gpu_count) return INVALID_ARGUMENT;
    *gpu = &state->gpus[index];
    return call(*gpu, BY_INDEX);
}

struct pci_info { /* nvmlPciInfo_t */
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci_info *info) {
    int error = call(gpu, PCI_INFO);
    if (error) return error;
    memset(info, 0, sizeof *info);
    memcpy(info->bus_id, gpu->bus_id, sizeof info->bus_id);
    sscanf(gpu->bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    int error = call(gpu, MIG_MODE);
    if (error) return error;
    *current = gpu->mig_enabled;
    *pending = !gpu->mig_enabled; /* a change waits for a reset of the GPU */
    return SUCCESS;
}

int nvmlDeviceGetSupportedMemoryClocks(struct gpu *gpu, unsigned *count, unsigned *clocks) {
    int error = call(gpu, MEMORY_CLOCKS);
    return error ? error : list(gpu->memory_clocks_mhz, gpu->memory_clock_count, count, clocks);
}

int nvmlDeviceGetSupportedGraphicsClocks(struct gpu *gpu, unsigned memory_mhz, unsigned *count, unsigned *clocks) {
    int error = call(gpu, GRAPHICS_CLOCKS);
    if (error) return error;
    for (unsigned i = 0; i < gpu->memory_clock_count; i++)
        if (gpu->memory_clocks_mhz[i] == memory_mhz) /* idle memory clocks allow the lowest SM clock only */
            return list(gpu->clocks_mhz + (i ? gpu->clock_count - 1 : 0), i ? 1 : gpu->clock_count, count, clocks);
    return NOT_FOUND;
}

int nvmlDeviceSetGpuLockedClocks(struct gpu *gpu, unsigned lowest_mhz, unsigned highest_mhz) {
    int error = call(gpu, SET_LOCKED);
    if (error) return error;
    if (lowest_mhz != highest_mhz) return INVALID_ARGUMENT; /* NVML accepts ranges, which no plan has */
    change_clock(gpu, highest_mhz);
    return SUCCESS;
}

int nvmlDeviceResetGpuLockedClocks(struct gpu *gpu) {
    int error = call(gpu, RESET_LOCKED);
    if (!error) change_clock(gpu, 0);
    return error;
}

int nvmlDeviceGetTotalEnergyConsumption(struct gpu *gpu, unsigned long long *millijoules) {
    int error = call(gpu, ENERGY);
    if (error) return error;
    if (!gpu->has_energy_counter) return NOT_SUPPORTED;
    uint64_t periods = (uint64_t)(now_s() / gpu->counter_period_s);
    *millijoules = (unsigned long long)(energy_j(gpu, periods * gpu->counter_period_s) * 1e3);
    return SUCCESS;
}

struct field_value { /* nvmlFieldValue_t */
    unsigned id, scope;
    long long timestamp, latency;
    int type, error;
    unsigned long long value;
};

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field_value *values) {
    int error = call(gpu, FIELDS);
    if (error) return error;
    for (int i = 0; i < count; i++) {
        struct field_value *v = &values[i];
        v->type = 3; /* unsigned long long */
        v->error = NOT_SUPPORTED;
        if (v->id == POWER_INSTANT && (v->scope == 0 ? !gpu->hides_gpu_power : gpu->module_w > 0)) {
            v->error = call(gpu, POWER);
            v->value = (unsigned long long)((drawn_w(gpu) + (v->scope ? gpu->module_w : 0)) * 1e3);
        }
        for (unsigned n = 0; n < gpu->field_count; n++)
            if (gpu->fields[n].id == v->id && gpu->fields[n].scope == v->scope) {
                v->error = SUCCESS;
                v->value = gpu->fields[n].value;
            }
    }
    return SUCCESS;
}

int nvmlDeviceGetC2cModeInfoV(struct gpu *gpu, unsigned *is_enabled) {
    int error = call(gpu, C2C_MODE);
    if (!error) *is_enabled = gpu->has_processor;
    return error;
}

struct power_profiles { /* nvmlWorkloadPowerProfileCurrentProfiles_v1_t */
    unsigned version, supported[8], requested[8], enforced[8];
};

int nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(struct gpu *gpu, struct power_profiles *profiles) {
    int error = call(gpu, POWER_PROFILES);
    if (error) return error;
    if (profiles->version != (0x1000000 | sizeof *profiles)) return INVALID_ARGUMENT;
    memcpy(profiles->enforced, gpu->power_profiles, sizeof profiles->enforced);
    return SUCCESS;
}

#define TEXT(name, function, text) \
    int name(struct gpu *gpu, char *to, unsigned length) { \
        int error = call(gpu, function); \
        if (!error) snprintf(to, length, "%s", text); \
        return error; \
    }
#define NUMBER(name, function, type, value) \
    int name(struct gpu *gpu, type *to) { \
        int error = call(gpu, function); \
        if (!error) *to = (type)(value); \
        return error; \
    }
#define CLOCK(name, function, sm_mhz) \
    int name(struct gpu *gpu, int domain, unsigned *mhz) { \
        int error = call(gpu, function); \
        if (!error) *mhz = domain == 2 ? memory_clock_mhz(gpu) : sm_mhz; \
        return error; \
    }

int nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, unsigned *celsius) {
    int error = call(gpu, TEMPERATURE);
    if (error) return error;
    if (!gpu->temperature_c) return NOT_SUPPORTED;
    if (sensor != 0) return INVALID_ARGUMENT; /* NVML_TEMPERATURE_GPU is the only one */
    *celsius = gpu->temperature_c;
    return SUCCESS;
}

TEXT(nvmlDeviceGetUUID, UUID, gpu->uuid)
TEXT(nvmlDeviceGetName, NAME, gpu->name)
NUMBER(nvmlDeviceGetPerformanceState, POWER_STATE, unsigned, gpu->power_state)
NUMBER(nvmlDeviceGetPowerUsage, POWER, unsigned, (gpu->average_power_w ? gpu->average_power_w : drawn_w(gpu)) * 1e3)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, ENFORCED_POWER_LIMIT, unsigned,
       (gpu->enforced_power_limit_w ? gpu->enforced_power_limit_w : gpu->power_limit_w) * 1e3)
NUMBER(nvmlDeviceGetPowerManagementLimit, POWER_LIMIT, unsigned, gpu->power_limit_w * 1e3)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, DEFAULT_POWER_LIMIT, unsigned, gpu->default_power_limit_w * 1e3)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, REASONS, unsigned long long, gpu->throttle_reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, REASONS, unsigned long long, gpu->throttle_reasons)
CLOCK(nvmlDeviceGetClockInfo, CLOCK_INFO, clock_mhz(gpu))
CLOCK(nvmlDeviceGetApplicationsClock, APPLICATION_CLOCK, gpu->application_clock_mhz)
CLOCK(nvmlDeviceGetDefaultApplicationsClock, DEFAULT_APPLICATION_CLOCK, gpu->default_application_clock_mhz)
