/* The host entry: runs this kernel from C or C++ without Python and without the CUDA toolkit.
 *
 * Compile this file as C99 or C++17 (cc -x c -c step.cu) and link it, with -ldl where libc needs
 * it. Another file gets the declarations by including the same text:
 *
 *     #define TRAINKERNEL_DECLARATIONS_ONLY
 *     #include "step.cu"
 *
 * All names begin with TRAINKERNEL_PREFIX (default: trainkernel), so kernels with different
 * prefixes live in one process. The driver library is opened at run time.
 *
 * Every int function returns TRAINKERNEL_OK or one of the codes below, and leaves a message that
 * trainkernel_last_error(handle) returns. Nothing here prints, exits, or changes the current
 * context. A handle belongs to one context and owns one workspace: use it from one thread at a
 * time. Launches on one stream follow each other; a launch on another stream than the last one
 * first waits on the host until the context is idle, so give each stream its own handle. A launch
 * captured into a graph is ordered by whoever replays the graph.
 */
#ifndef TRAINKERNEL_PREFIX
#define TRAINKERNEL_PREFIX trainkernel
#define TK_HOST_DEFAULT_PREFIX
#endif
#define TK_HOST_JOIN_EXPANDED(prefix, name) prefix##_##name
#define TK_HOST_JOIN(prefix, name) TK_HOST_JOIN_EXPANDED(prefix, name)
#define TK_HOST(name) TK_HOST_JOIN(TRAINKERNEL_PREFIX, name)

#include <stddef.h>
#include <stdint.h>

#define TRAINKERNEL_OK 0
#define TRAINKERNEL_ERROR_ARGUMENT 1         /* a count, pointer or size that does not fit this kernel */
#define TRAINKERNEL_ERROR_NO_DRIVER 2        /* the driver library is missing or too old */
#define TRAINKERNEL_ERROR_NO_DEVICE 3        /* no GPU */
#define TRAINKERNEL_ERROR_UNSUPPORTED 4      /* the GPU lacks cooperative launch or enough shared memory */
#define TRAINKERNEL_ERROR_CUBIN 5            /* not a cubin, for another architecture, or of another kernel */
#define TRAINKERNEL_ERROR_NOT_RESIDENT 6     /* not even one block fits an SM */
#define TRAINKERNEL_ERROR_MEMORY 7           /* out of host or device memory */
#define TRAINKERNEL_ERROR_DRIVER 8           /* another driver call failed; the message names it */
#define TRAINKERNEL_ERROR_BARRIER_TIMEOUT 9  /* found by trainkernel_check; the message names the stage */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct TK_HOST(handle) TK_HOST(handle);

/* A tensor: the bytes from its first to its last element, and the alignment its address needs.
 * An in-place input is updated by the launch; it has no entry among the outputs. */
typedef struct TK_HOST(tensor) {
    const char* name;
    const char* dtype;
    uint64_t bytes;
    uint32_t alignment_bytes;
    int in_place;
} TK_HOST(tensor);

/* A scalar input. Its value is in the int32 member for dtypes int32 and bool (0 or 1), where it
 * must lie from minimum to maximum; else in the float32 member, rounded to the dtype by the caller. */
typedef struct TK_HOST(scalar_description) {
    const char* name;
    const char* dtype;
    int is_integer;
    int32_t minimum;
    int32_t maximum;
} TK_HOST(scalar_description);

typedef union TK_HOST(scalar) {
    float float32;
    int32_t int32;
} TK_HOST(scalar);

typedef struct TK_HOST(info) {
    int registers_per_thread;
    int local_bytes_per_thread;
    int static_shared_bytes;
    int dynamic_shared_bytes;
    int threads_per_block;
    int resident_blocks_per_sm; /* what fits, before the kernel's own bound */
    int num_sms;
    int grid_blocks;
    int num_inputs;
    int num_outputs;
    int num_scalars;
    int device;
    int compute_capability; /* 90 for 9.0 */
    int driver_version;     /* 13000 for 13.0 */
    uint64_t workspace_bytes;
} TK_HOST(info);

/* What the kernel takes and gives, in launch order. These need no driver and no device. */
const TK_HOST(tensor) * TK_HOST(inputs)(int* num_inputs);
const TK_HOST(tensor) * TK_HOST(outputs)(int* num_outputs);
const TK_HOST(scalar_description) * TK_HOST(scalars)(int* num_scalars);

/* Loads the cubin into the current context, or into device 0's primary context when none is
 * current. On failure *handle is NULL and the message goes to the caller's buffer (may be NULL). */
int TK_HOST(init)(TK_HOST(handle) * *handle, const void* cubin, size_t cubin_bytes, char* message,
                  size_t message_bytes);

int TK_HOST(query)(TK_HOST(handle) * handle, TK_HOST(info) * info);

/* Enqueues one launch. inputs and outputs are device pointers to first elements; stream is a
 * CUstream, NULL for the default stream. The kernel's outputs may not overlap any other tensor. */
int TK_HOST(launch)(TK_HOST(handle) * handle, void* const* inputs, int num_inputs, void* const* outputs,
                    int num_outputs, const TK_HOST(scalar) * scalars, int num_scalars, void* stream);

/* Waits until the context is idle; reports a launch that failed or did not pass a barrier. */
int TK_HOST(check)(TK_HOST(handle) * handle);

/* How long later launches wait at a grid barrier, in nanoseconds; 0 (the default) is for ever. */
int TK_HOST(set_barrier_timeout)(TK_HOST(handle) * handle, uint64_t nanoseconds);

/* Device memory in the handle's context, for programs that have no allocator of their own. The
 * copies wait for all work of the context before, and are done when they return. */
int TK_HOST(allocate)(TK_HOST(handle) * handle, size_t bytes, void** pointer);
int TK_HOST(free)(TK_HOST(handle) * handle, void* pointer);
int TK_HOST(upload)(TK_HOST(handle) * handle, void* device, const void* host, size_t bytes);
int TK_HOST(download)(TK_HOST(handle) * handle, void* host, const void* device, size_t bytes);

/* The message of the handle's last failure; "" if there was none. */
const char* TK_HOST(last_error)(const TK_HOST(handle) * handle);

/* Waits for the context and frees the handle, also when it returns an error. */
int TK_HOST(destroy)(TK_HOST(handle) * handle);

#ifdef __cplusplus
}
#endif
