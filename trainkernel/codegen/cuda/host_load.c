/* Host entry, part 1: the driver library, the cubin, the grid and the workspace. Never compiled
 * alone: it stands between host_api.c with the generated tables and host_entry.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#define TK_HOST_CALL __stdcall
#ifndef TRAINKERNEL_DRIVER_LIBRARY
#define TRAINKERNEL_DRIVER_LIBRARY "nvcuda.dll"
#endif
#else
#include <dlfcn.h>
#define TK_HOST_CALL
#ifndef TRAINKERNEL_DRIVER_LIBRARY
#define TRAINKERNEL_DRIVER_LIBRARY "libcuda.so.1"
#endif
#endif

/* The driver functions used, under the C types of their binary interface: CUresult and CUdevice
 * are ints, CUdeviceptr is 64 bits, contexts, modules, functions and streams are pointers. */
typedef unsigned long long TK_HOST(device_pointer);

typedef struct TK_HOST(driver) {
    int(TK_HOST_CALL* init)(unsigned flags);
    int(TK_HOST_CALL* driver_get_version)(int* version);
    int(TK_HOST_CALL* get_error_name)(int result, const char** name);
    int(TK_HOST_CALL* get_error_string)(int result, const char** text);
    int(TK_HOST_CALL* device_get)(int* device, int ordinal);
    int(TK_HOST_CALL* device_get_attribute)(int* value, int attribute, int device);
    int(TK_HOST_CALL* primary_ctx_retain)(void** context, int device);
    int(TK_HOST_CALL* primary_ctx_release)(int device);
    int(TK_HOST_CALL* ctx_get_current)(void** context);
    int(TK_HOST_CALL* ctx_push_current)(void* context);
    int(TK_HOST_CALL* ctx_pop_current)(void** context);
    int(TK_HOST_CALL* ctx_get_device)(int* device);
    int(TK_HOST_CALL* ctx_synchronize)(void);
    int(TK_HOST_CALL* module_load_data)(void** module, const void* image);
    int(TK_HOST_CALL* module_unload)(void* module);
    int(TK_HOST_CALL* module_get_function)(void** function, void* module, const char* name);
    int(TK_HOST_CALL* func_get_attribute)(int* value, int attribute, void* function);
    int(TK_HOST_CALL* func_set_attribute)(void* function, int attribute, int value);
    int(TK_HOST_CALL* func_get_param_info)(void* function, size_t index, size_t* offset, size_t* size);
    int(TK_HOST_CALL* occupancy)(int* blocks, void* function, int threads, size_t shared_bytes);
    int(TK_HOST_CALL* mem_alloc)(TK_HOST(device_pointer) * pointer, size_t bytes);
    int(TK_HOST_CALL* mem_free)(TK_HOST(device_pointer) pointer);
    int(TK_HOST_CALL* memset_d8_async)(TK_HOST(device_pointer) pointer, unsigned char value, size_t bytes,
                                       void* stream);
    int(TK_HOST_CALL* memcpy_htod)(TK_HOST(device_pointer) to, const void* from, size_t bytes);
    int(TK_HOST_CALL* memcpy_htod_async)(TK_HOST(device_pointer) to, const void* from, size_t bytes, void* stream);
    int(TK_HOST_CALL* memcpy_dtoh)(void* to, TK_HOST(device_pointer) from, size_t bytes);
    int(TK_HOST_CALL* launch_cooperative)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                          void* stream, void** parameters);
} TK_HOST(driver);

struct TK_HOST(handle) {
    TK_HOST(driver) driver;
    void* context;
    int retained_primary; /* whether destroy must release device's primary context */
    void* module;
    void* function;
    TK_HOST(info) info;
    TK_HOST(device_pointer) workspace;
    TK_HOST(device_pointer) table; /* the device array of tensor pointers, in table mode */
    int header_dirty;              /* the workspace header must be zeroed before the next launch */
    int pointers_valid;            /* pointers[] were checked, and are in the table where there is one */
    void* pointers[TK_HOST_NUM_SLOTS > 0 ? TK_HOST_NUM_SLOTS : 1];
    int launched;
    void* stream;                                              /* of the last launch */
    unsigned long long params[(TK_HOST_PARAMS_BYTES + 7) / 8]; /* the kernel's parameter block */
    char message[512];
};

/* Writes the message of a failed driver call and returns the code that it means. */
static int TK_HOST(driver_failed)(TK_HOST(handle) * handle, const char* call, int result) {
    const char* name = NULL;
    const char* text = NULL;
    if (handle->driver.get_error_name != NULL) handle->driver.get_error_name(result, &name);
    if (handle->driver.get_error_string != NULL) handle->driver.get_error_string(result, &text);
    snprintf(handle->message, sizeof handle->message, "%s failed with %s (%d): %s", call,
             name != NULL ? name : "an unknown error", result, text != NULL ? text : "no description");
    if (result == 2) return TRAINKERNEL_ERROR_MEMORY;      /* CUDA_ERROR_OUT_OF_MEMORY */
    if (result == 100) return TRAINKERNEL_ERROR_NO_DEVICE; /* CUDA_ERROR_NO_DEVICE */
    return TRAINKERNEL_ERROR_DRIVER;
}

/* Returns from the enclosing function when a driver call fails. */
#define TK_HOST_TRY(handle, name, call)                                              \
    do {                                                                             \
        int tk_result = (call);                                                      \
        if (tk_result != 0) return TK_HOST(driver_failed)((handle), name, tk_result); \
    } while (0)

static int TK_HOST(find_symbol)(void* library, const char* name, void* function, size_t function_bytes) {
#ifdef _WIN32
    FARPROC symbol = GetProcAddress((HMODULE)library, name);
#else
    void* symbol = dlsym(library, name);
#endif
    if (symbol == NULL || sizeof symbol != function_bytes) return 0;
    /* Copied, because ISO C has no conversion from an object pointer to a function pointer. */
    memcpy(function, &symbol, function_bytes);
    return 1;
}

/* Opens the driver library (it stays open: the driver does not support being unloaded). */
static int TK_HOST(open_driver)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    const char* missing = NULL;
#ifdef _WIN32
    void* library = (void*)LoadLibraryA(TRAINKERNEL_DRIVER_LIBRARY);
#else
    void* library = dlopen(TRAINKERNEL_DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
#endif
    if (library == NULL) {
        snprintf(handle->message, sizeof handle->message,
                 "the CUDA driver library %s cannot be opened; install the NVIDIA driver", TRAINKERNEL_DRIVER_LIBRARY);
        return TRAINKERNEL_ERROR_NO_DRIVER;
    }
#define TK_HOST_FIND(member, name) \
    if (!TK_HOST(find_symbol)(library, name, &driver->member, sizeof driver->member)) missing = name
    TK_HOST_FIND(init, "cuInit");
    TK_HOST_FIND(driver_get_version, "cuDriverGetVersion");
    TK_HOST_FIND(get_error_name, "cuGetErrorName");
    TK_HOST_FIND(get_error_string, "cuGetErrorString");
    TK_HOST_FIND(device_get, "cuDeviceGet");
    TK_HOST_FIND(device_get_attribute, "cuDeviceGetAttribute");
    TK_HOST_FIND(primary_ctx_retain, "cuDevicePrimaryCtxRetain");
    TK_HOST_FIND(primary_ctx_release, "cuDevicePrimaryCtxRelease_v2");
    TK_HOST_FIND(ctx_get_current, "cuCtxGetCurrent");
    TK_HOST_FIND(ctx_push_current, "cuCtxPushCurrent_v2");
    TK_HOST_FIND(ctx_pop_current, "cuCtxPopCurrent_v2");
    TK_HOST_FIND(ctx_get_device, "cuCtxGetDevice");
    TK_HOST_FIND(ctx_synchronize, "cuCtxSynchronize");
    TK_HOST_FIND(module_load_data, "cuModuleLoadData");
    TK_HOST_FIND(module_unload, "cuModuleUnload");
    TK_HOST_FIND(module_get_function, "cuModuleGetFunction");
    TK_HOST_FIND(func_get_attribute, "cuFuncGetAttribute");
    TK_HOST_FIND(func_set_attribute, "cuFuncSetAttribute");
    TK_HOST_FIND(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    TK_HOST_FIND(mem_alloc, "cuMemAlloc_v2");
    TK_HOST_FIND(mem_free, "cuMemFree_v2");
    TK_HOST_FIND(memset_d8_async, "cuMemsetD8Async");
    TK_HOST_FIND(memcpy_htod, "cuMemcpyHtoD_v2");
    TK_HOST_FIND(memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
    TK_HOST_FIND(memcpy_dtoh, "cuMemcpyDtoH_v2");
    TK_HOST_FIND(launch_cooperative, "cuLaunchCooperativeKernel");
#undef TK_HOST_FIND
    if (missing != NULL) {
        snprintf(handle->message, sizeof handle->message, "the driver library %s has no %s; install a newer driver",
                 TRAINKERNEL_DRIVER_LIBRARY, missing);
        return TRAINKERNEL_ERROR_NO_DRIVER;
    }
    /* Only newer drivers have it; used to check the cubin's parameter block. */
    (void)TK_HOST(find_symbol)(library, "cuFuncGetParamInfo", &driver->func_get_param_info,
                               sizeof driver->func_get_param_info);
    return TRAINKERNEL_OK;
}

/* Makes the handle's context current; *pushed says whether leave must undo that. */
static int TK_HOST(enter)(TK_HOST(handle) * handle, int* pushed) {
    void* current = NULL;
    *pushed = 0;
    TK_HOST_TRY(handle, "cuCtxGetCurrent", handle->driver.ctx_get_current(&current));
    if (current == handle->context) return TRAINKERNEL_OK;
    TK_HOST_TRY(handle, "cuCtxPushCurrent", handle->driver.ctx_push_current(handle->context));
    *pushed = 1;
    return TRAINKERNEL_OK;
}

static void TK_HOST(leave)(TK_HOST(handle) * handle, int pushed) {
    void* popped = NULL;
    if (pushed) handle->driver.ctx_pop_current(&popped);
}

/* Whether a table or content of an ELF file ends inside its bytes. */
static int TK_HOST(elf_holds)(size_t cubin_bytes, uint64_t offset, uint64_t bytes) {
    return offset <= cubin_bytes && bytes <= cubin_bytes - offset;
}

/* Whether a 64-bit ELF file has all its segment and section headers, and all sections' content. */
static int TK_HOST(elf_is_whole)(const unsigned char* bytes, size_t cubin_bytes) {
    uint64_t tables[2];    /* offsets of the segment and section headers */
    uint16_t shape[4];     /* size and number of segment headers, then of section headers */
    uint64_t extent[2];    /* a section's offset and size */
    uint32_t section_type = 0;
    int section = 0;
    memcpy(tables, bytes + 32, sizeof tables);
    memcpy(shape, bytes + 54, sizeof shape);
    if (!TK_HOST(elf_holds)(cubin_bytes, tables[0], (uint64_t)shape[0] * shape[1])) return 0;
    if (!TK_HOST(elf_holds)(cubin_bytes, tables[1], (uint64_t)shape[2] * shape[3])) return 0;
    for (section = 0; section < shape[3] && shape[2] >= 64; ++section) {
        const unsigned char* header = bytes + tables[1] + (size_t)section * shape[2];
        memcpy(&section_type, header + 4, sizeof section_type);
        memcpy(extent, header + 24, sizeof extent);
        if (section_type == 0 || section_type == 8) continue; /* unused; content not in the file */
        if (!TK_HOST(elf_holds)(cubin_bytes, extent[0], extent[1])) return 0;
    }
    return 1;
}

/* Fails unless the bytes hold a whole 64-bit ELF file: the driver is given no length. */
static int TK_HOST(check_cubin)(TK_HOST(handle) * handle, const void* cubin, size_t cubin_bytes) {
    const unsigned char* bytes = (const unsigned char*)cubin;
    if (cubin_bytes < 64 || memcmp(bytes, "\177ELF\002", 5) != 0) {
        snprintf(handle->message, sizeof handle->message, "the %llu bytes given are not a cubin (64-bit ELF)",
                 (unsigned long long)cubin_bytes);
        return TRAINKERNEL_ERROR_CUBIN;
    }
    if (!TK_HOST(elf_is_whole)(bytes, cubin_bytes)) {
        snprintf(handle->message, sizeof handle->message, "the cubin is cut off: %llu bytes given",
                 (unsigned long long)cubin_bytes);
        return TRAINKERNEL_ERROR_CUBIN;
    }
    return TRAINKERNEL_OK;
}

/* Fails unless the device can launch cooperatively and has the shared memory. */
static int TK_HOST(check_device)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    TK_HOST(info)* info = &handle->info;
    int cooperative = 0;
    int shared_bytes = 0;
    int major = 0;
    int minor = 0;
    TK_HOST_TRY(handle, "cuCtxGetDevice", driver->ctx_get_device(&info->device));
    TK_HOST_TRY(handle, "cuDeviceGetAttribute", driver->device_get_attribute(&major, 75, info->device));
    TK_HOST_TRY(handle, "cuDeviceGetAttribute", driver->device_get_attribute(&minor, 76, info->device));
    TK_HOST_TRY(handle, "cuDeviceGetAttribute", driver->device_get_attribute(&cooperative, 95, info->device));
    TK_HOST_TRY(handle, "cuDeviceGetAttribute", driver->device_get_attribute(&shared_bytes, 97, info->device));
    TK_HOST_TRY(handle, "cuDeviceGetAttribute", driver->device_get_attribute(&info->num_sms, 16, info->device));
    info->compute_capability = 10 * major + minor;
    if (!cooperative) {
        snprintf(handle->message, sizeof handle->message, "device %d does not support cooperative launch",
                 info->device);
        return TRAINKERNEL_ERROR_UNSUPPORTED;
    }
    if (TK_HOST_SHARED_BYTES > shared_bytes) {
        snprintf(handle->message, sizeof handle->message,
                 "the kernel needs %d bytes of dynamic shared memory per block; device %d has %d. Generate it for "
                 "this device's target",
                 TK_HOST_SHARED_BYTES, info->device, shared_bytes);
        return TRAINKERNEL_ERROR_UNSUPPORTED;
    }
    return TRAINKERNEL_OK;
}

/* Fails unless the loaded function has this kernel's parameter block and block size. */
static int TK_HOST(check_function)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    size_t offset = 0;
    size_t first_bytes = 0;
    size_t second_bytes = 0;
    int max_threads = 0;
    if (driver->func_get_param_info != NULL) {
        int first = driver->func_get_param_info(handle->function, 0, &offset, &first_bytes);
        int second = driver->func_get_param_info(handle->function, 1, &offset, &second_bytes);
        if (first != 0 || second == 0 || first_bytes != TK_HOST_PARAMS_BYTES) {
            snprintf(handle->message, sizeof handle->message,
                     "the cubin is of another kernel: its first parameter has %llu bytes, %s; this source's kernel "
                     "has one of %d. Compile the cubin from this source",
                     (unsigned long long)first_bytes, second == 0 ? "and it has more" : "and no other",
                     TK_HOST_PARAMS_BYTES);
            return TRAINKERNEL_ERROR_CUBIN;
        }
    }
    TK_HOST_TRY(handle, "cuFuncGetAttribute", driver->func_get_attribute(&max_threads, 0, handle->function));
    if (max_threads < TK_HOST_THREADS_PER_BLOCK) {
        snprintf(handle->message, sizeof handle->message,
                 "the cubin is of another kernel: it allows %d threads per block, this source's kernel has %d. "
                 "Compile the cubin from this source",
                 max_threads, TK_HOST_THREADS_PER_BLOCK);
        return TRAINKERNEL_ERROR_CUBIN;
    }
    return TRAINKERNEL_OK;
}

static int TK_HOST(load_cubin)(TK_HOST(handle) * handle, const void* cubin) {
    TK_HOST(driver)* driver = &handle->driver;
    int result = driver->module_load_data(&handle->module, cubin);
    if (result == 200 || result == 209 || result == 222 || result == 300) {
        /* invalid image, no binary for the GPU, unsupported PTX version, invalid source */
        snprintf(handle->message, sizeof handle->message,
                 "the driver refused the cubin with error %d; device %d needs one compiled for sm_%d", result,
                 handle->info.device, handle->info.compute_capability);
        return TRAINKERNEL_ERROR_CUBIN;
    }
    TK_HOST_TRY(handle, "cuModuleLoadData", result);
    result = driver->module_get_function(&handle->function, handle->module, TK_HOST_ENTRY);
    if (result == 500) { /* CUDA_ERROR_NOT_FOUND */
        snprintf(handle->message, sizeof handle->message, "the cubin has no kernel %s", TK_HOST_ENTRY);
        return TRAINKERNEL_ERROR_CUBIN;
    }
    TK_HOST_TRY(handle, "cuModuleGetFunction", result);
    return TK_HOST(check_function)(handle);
}

/* Reads the kernel's resources and fixes the grid. */
static int TK_HOST(plan_grid)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    TK_HOST(info)* info = &handle->info;
    int blocks_per_sm = 0;
    int grid = 0;
    TK_HOST_TRY(handle, "cuFuncGetAttribute",
                driver->func_get_attribute(&info->static_shared_bytes, 1, handle->function));
    TK_HOST_TRY(handle, "cuFuncGetAttribute",
                driver->func_get_attribute(&info->local_bytes_per_thread, 3, handle->function));
    TK_HOST_TRY(handle, "cuFuncGetAttribute",
                driver->func_get_attribute(&info->registers_per_thread, 4, handle->function));
    if (TK_HOST_SHARED_BYTES > 0) {
        TK_HOST_TRY(handle, "cuFuncSetAttribute",
                    driver->func_set_attribute(handle->function, 8, TK_HOST_SHARED_BYTES));
    }
    TK_HOST_TRY(handle, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                driver->occupancy(&info->resident_blocks_per_sm, handle->function, TK_HOST_THREADS_PER_BLOCK,
                                  TK_HOST_SHARED_BYTES));
    if (info->resident_blocks_per_sm < 1) {
        snprintf(handle->message, sizeof handle->message,
                 "the kernel cannot be resident on device %d: %d threads x %d registers and %d + %d bytes of shared "
                 "memory per block do not fit an SM. Generate it with fewer threads_per_block",
                 info->device, TK_HOST_THREADS_PER_BLOCK, info->registers_per_thread, TK_HOST_SHARED_BYTES,
                 info->static_shared_bytes);
        return TRAINKERNEL_ERROR_NOT_RESIDENT;
    }
    blocks_per_sm = info->resident_blocks_per_sm;
    if (blocks_per_sm > TK_HOST_BLOCKS_PER_SM) blocks_per_sm = TK_HOST_BLOCKS_PER_SM;
    grid = info->num_sms * blocks_per_sm;
    if (grid > TK_HOST_MAX_WORK_BLOCKS) grid = TK_HOST_MAX_WORK_BLOCKS;
    if (TK_HOST_MAX_BLOCKS > 0 && grid > TK_HOST_MAX_BLOCKS) grid = TK_HOST_MAX_BLOCKS;
    info->grid_blocks = grid > 1 ? grid : 1;
    return TRAINKERNEL_OK;
}

static int TK_HOST(make_workspace)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    TK_HOST_TRY(handle, "cuMemAlloc (workspace)", driver->mem_alloc(&handle->workspace, TK_HOST_WORKSPACE_BYTES));
    TK_HOST_TRY(handle, "cuMemsetD8Async (workspace header)",
                driver->memset_d8_async(handle->workspace, 0, TK_HOST_HEADER_BYTES, NULL));
    memcpy(handle->params, &handle->workspace, 8);
    if (TK_HOST_USES_TENSOR_TABLE) {
        TK_HOST_TRY(handle, "cuMemAlloc (tensor table)", driver->mem_alloc(&handle->table, 8 * TK_HOST_NUM_SLOTS));
        memcpy(handle->params + 2, &handle->table, 8);
    }
    TK_HOST_TRY(handle, "cuCtxSynchronize", driver->ctx_synchronize());
    return TRAINKERNEL_OK;
}

/* Everything of init that needs the context to be current. */
static int TK_HOST(load)(TK_HOST(handle) * handle, const void* cubin) {
    int code = TK_HOST(check_device)(handle);
    if (code == TRAINKERNEL_OK) code = TK_HOST(load_cubin)(handle, cubin);
    if (code == TRAINKERNEL_OK) code = TK_HOST(plan_grid)(handle);
    if (code == TRAINKERNEL_OK) code = TK_HOST(make_workspace)(handle);
    return code;
}

/* Frees what the handle holds in its context, and reports the first failure. */
static int TK_HOST(unload)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    int result = driver->ctx_synchronize();
    int freed = handle->table != 0 ? driver->mem_free(handle->table) : 0;
    if (result == 0) result = freed;
    freed = handle->workspace != 0 ? driver->mem_free(handle->workspace) : 0;
    if (result == 0) result = freed;
    freed = handle->module != NULL ? driver->module_unload(handle->module) : 0;
    return result != 0 ? result : freed;
}

static int TK_HOST(open_handle)(TK_HOST(handle) * handle, const void* cubin, size_t cubin_bytes) {
    TK_HOST(driver)* driver = &handle->driver;
    int pushed = 0;
    int device = 0;
    int code = TK_HOST(check_cubin)(handle, cubin, cubin_bytes);
    if (code == TRAINKERNEL_OK) code = TK_HOST(open_driver)(handle);
    if (code != TRAINKERNEL_OK) return code;
    TK_HOST_TRY(handle, "cuInit", driver->init(0));
    TK_HOST_TRY(handle, "cuDriverGetVersion", driver->driver_get_version(&handle->info.driver_version));
    TK_HOST_TRY(handle, "cuCtxGetCurrent", driver->ctx_get_current(&handle->context));
    if (handle->context == NULL) {
        TK_HOST_TRY(handle, "cuDeviceGet", driver->device_get(&device, 0));
        TK_HOST_TRY(handle, "cuDevicePrimaryCtxRetain", driver->primary_ctx_retain(&handle->context, device));
        handle->retained_primary = 1;
        handle->info.device = device;
    }
    code = TK_HOST(enter)(handle, &pushed);
    if (code == TRAINKERNEL_OK) {
        code = TK_HOST(load)(handle, cubin);
        if (code != TRAINKERNEL_OK) (void)TK_HOST(unload)(handle);
        TK_HOST(leave)(handle, pushed);
    }
    if (code != TRAINKERNEL_OK && handle->retained_primary) driver->primary_ctx_release(device);
    return code;
}

int TK_HOST(init)(TK_HOST(handle) * *handle, const void* cubin, size_t cubin_bytes, char* message,
                  size_t message_bytes) {
    TK_HOST(handle)* made = NULL;
    const char* text = "";
    int code = TRAINKERNEL_OK;
    if (handle != NULL) *handle = NULL;
    if (handle == NULL || cubin == NULL) {
        text = handle == NULL ? "init was given no place for the handle" : "init was given no cubin";
        code = TRAINKERNEL_ERROR_ARGUMENT;
    } else {
        made = (TK_HOST(handle)*)calloc(1, sizeof *made);
        text = made == NULL ? "out of host memory" : made->message;
        code = made == NULL ? TRAINKERNEL_ERROR_MEMORY : TK_HOST(open_handle)(made, cubin, cubin_bytes);
    }
    if (message != NULL && message_bytes > 0) snprintf(message, message_bytes, "%s", text);
    if (code != TRAINKERNEL_OK) {
        free(made);
        return code;
    }
    made->info.threads_per_block = TK_HOST_THREADS_PER_BLOCK;
    made->info.dynamic_shared_bytes = TK_HOST_SHARED_BYTES;
    made->info.workspace_bytes = TK_HOST_WORKSPACE_BYTES;
    made->info.num_inputs = TK_HOST_NUM_INPUTS;
    made->info.num_outputs = TK_HOST_NUM_OUTPUTS;
    made->info.num_scalars = TK_HOST_NUM_SCALARS;
    *handle = made;
    return TRAINKERNEL_OK;
}
