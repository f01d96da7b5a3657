/* A CUDA driver without a GPU, for the tests of the host entry: device memory is host memory, and
 * a launch runs the tests' one kernel on the CPU:
 *
 *     loss = sum(x * w);  w -= rate * x;  w[0] += step        (x, w: NUM_ELEMENTS floats)
 *
 * The settings, a text given to mock_reset or in the environment variable MOCK_DRIVER, say what
 * goes wrong: no_device, no_cooperative, zero_residency, bad_image, no_symbol, wrong_params,
 * few_threads, launch_fails, barrier_timeout, table (the kernel reads a pointer table), and
 * fail:NAME (that driver function returns 999).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUM_ELEMENTS 16

char mock_settings[256]; /* not static: tests change it between calls */
static char calls[16384];
static void* stack[16];
static int depth;
static int live_allocations;
static int live_modules;
static int primary_retains;
static int last_grid;
static int shared_attribute;

static int has(const char* word) { return strstr(mock_settings, word) != NULL; }

/* Records a call and returns the failure that the settings ask for. */
static int called(const char* name) {
    char failure[64];
    size_t used = strlen(calls);
    snprintf(calls + used, sizeof calls - used, "%s ", name);
    snprintf(failure, sizeof failure, "fail:%s;", name);
    return has(failure) ? 999 : 0;
}

void mock_reset(const char* text) {
    snprintf(mock_settings, sizeof mock_settings, "%s;", text);
    calls[0] = 0;
    depth = live_allocations = live_modules = primary_retains = last_grid = shared_attribute = 0;
}

const char* mock_calls(void) { return calls; }
void mock_clear_calls(void) { calls[0] = 0; }
void mock_make_current(void* context) { stack[depth++] = context; }
void* mock_current(void) { return depth > 0 ? stack[depth - 1] : NULL; }
int mock_live_allocations(void) { return live_allocations; }
int mock_live_modules(void) { return live_modules; }
int mock_primary_retains(void) { return primary_retains; }
int mock_last_grid(void) { return last_grid; }
int mock_shared_attribute(void) { return shared_attribute; }

int cuInit(unsigned flags) {
    const char* environment = getenv("MOCK_DRIVER");
    (void)flags;
    if (environment != NULL) mock_reset(environment);
    return has("no_device") ? 100 : called("cuInit");
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return called("cuDriverGetVersion");
}

int cuGetErrorName(int result, const char** name) {
    *name = result == 100 ? "CUDA_ERROR_NO_DEVICE" : result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuGetErrorString(int result, const char** text) {
    (void)result;
    *text = "mock error";
    return 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return called("cuDeviceGet");
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    switch (attribute) {
        case 16: *value = 3; break;                     /* SMs */
        case 75: *value = 9; break;                     /* compute capability */
        case 76: *value = 0; break;
        case 95: *value = !has("no_cooperative"); break;
        case 97: *value = 232448; break;                /* shared memory per block */
        default: return 1;
    }
    return called("cuDeviceGetAttribute");
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    (void)device;
    ++primary_retains;
    *context = (void*)(uintptr_t)0x1000;
    return called("cuDevicePrimaryCtxRetain");
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    --primary_retains;
    return called("cuDevicePrimaryCtxRelease");
}

int cuCtxGetCurrent(void** context) {
    *context = mock_current();
    return called("cuCtxGetCurrent");
}

int cuCtxPushCurrent_v2(void* context) {
    mock_make_current(context);
    return called("cuCtxPushCurrent");
}

int cuCtxPopCurrent_v2(void** context) {
    if (depth == 0) return 201;
    *context = stack[--depth];
    return called("cuCtxPopCurrent");
}

int cuCtxGetDevice(int* device) {
    *device = 0;
    return depth > 0 ? called("cuCtxGetDevice") : 201;
}

int cuCtxSynchronize(void) { return depth > 0 ? called("cuCtxSynchronize") : 201; }

int cuModuleLoadData(void** module, const void* image) {
    (void)image;
    if (depth == 0) return 201;
    if (has("bad_image")) return 209;
    ++live_modules;
    *module = &live_modules;
    return called("cuModuleLoadData");
}

int cuModuleUnload(void* module) {
    (void)module;
    --live_modules;
    return called("cuModuleUnload");
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    (void)module;
    if (has("no_symbol") || strcmp(name, "trainkernel_step") != 0) return 500;
    *function = &last_grid;
    return called("cuModuleGetFunction");
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
    (void)function;
    *value = attribute == 0 ? (has("few_threads") ? 64 : 1024) : attribute == 4 ? 32 : 0;
    return called("cuFuncGetAttribute");
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
    (void)function;
    if (attribute == 8) shared_attribute = value;
    return called("cuFuncSetAttribute");
}

int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
    (void)function;
    if (index > 0) return 1;
    *offset = 0;
    *size = has("wrong_params") ? 40 : has("table") ? 32 : 48;
    return called("cuFuncGetParamInfo");
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared_bytes) {
    (void)function;
    (void)threads;
    (void)shared_bytes;
    *blocks = has("zero_residency") ? 0 : 4;
    return called("cuOccupancy");
}

int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
    void* made = NULL;
    if (depth == 0) return 201;
    if (called("cuMemAlloc") != 0) return 2;
    if (posix_memalign(&made, 256, bytes) != 0) return 2;
    memset(made, 0xAB, bytes); /* device memory holds anything */
    ++live_allocations;
    *pointer = (unsigned long long)(uintptr_t)made;
    return 0;
}

int cuMemFree_v2(unsigned long long pointer) {
    free((void*)(uintptr_t)pointer);
    --live_allocations;
    return called("cuMemFree");
}

int cuMemsetD8Async(unsigned long long pointer, unsigned char value, size_t bytes, void* stream) {
    (void)stream;
    memset((void*)(uintptr_t)pointer, value, bytes);
    return called("cuMemsetD8Async");
}

int cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t bytes) {
    memcpy((void*)(uintptr_t)to, from, bytes);
    return called("cuMemcpyHtoD");
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
    (void)stream;
    memcpy((void*)(uintptr_t)to, from, bytes);
    return called("cuMemcpyHtoDAsync");
}

int cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t bytes) {
    memcpy(to, (const void*)(uintptr_t)from, bytes);
    return called("cuMemcpyDtoH");
}

int cuLaunchCooperativeKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream,
                              void** parameters) {
    const unsigned char* params = (const unsigned char*)parameters[0];
    float* tensors[3];
    uint32_t* header;
    uint64_t timeout_ns;
    float rate;
    int32_t step;
    float loss = 0.0f;
    int i;
    int scalars_at = has("table") ? 24 : 40;
    (void)function, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared_bytes;
    (void)stream;
    last_grid = (int)grid_x;
    if (depth == 0) return 201;
    if (called("cuLaunchCooperativeKernel") != 0 || has("launch_fails")) return 720;
    memcpy(&header, params, 8);
    memcpy(&timeout_ns, params + 8, 8);
    if (header[0] != 0 || header[1] != 0) return 719; /* the header must have been zeroed */
    if (has("barrier_timeout") && timeout_ns != 0) {
        header[0] = 7;
        header[1] = 1 + 1; /* stage 1 */
        return 0;
    }
    if (has("table")) {
        const void* table;
        memcpy(&table, params + 16, 8);
        memcpy(tensors, table, sizeof tensors);
    } else {
        memcpy(tensors, params + 16, sizeof tensors);
    }
    memcpy(&rate, params + scalars_at, 4);
    memcpy(&step, params + scalars_at + 4, 4);
    for (i = 0; i < NUM_ELEMENTS; ++i) loss += tensors[0][i] * tensors[1][i];
    for (i = 0; i < NUM_ELEMENTS; ++i) tensors[1][i] -= rate * tensors[0][i];
    tensors[1][0] += (float)step;
    tensors[2][0] = loss;
    return 0;
}
