/* Host entry, part 2: description, launch, check and memory. Never compiled alone: it comes after
 * host_load.c. */

const TK_HOST(tensor) * TK_HOST(inputs)(int* num_inputs) {
    if (num_inputs != NULL) *num_inputs = TK_HOST_NUM_INPUTS;
    return TK_HOST(slots);
}

const TK_HOST(tensor) * TK_HOST(outputs)(int* num_outputs) {
    if (num_outputs != NULL) *num_outputs = TK_HOST_NUM_OUTPUTS;
    return TK_HOST(slots) + TK_HOST_NUM_INPUTS;
}

const TK_HOST(scalar_description) * TK_HOST(scalars)(int* num_scalars) {
    if (num_scalars != NULL) *num_scalars = TK_HOST_NUM_SCALARS;
    return TK_HOST(scalar_table);
}

int TK_HOST(query)(TK_HOST(handle) * handle, TK_HOST(info) * info) {
    if (handle == NULL || info == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    *info = handle->info;
    return TRAINKERNEL_OK;
}

/* Whether two slots' byte ranges share a byte. */
static int TK_HOST(overlap)(void* const* pointers, int a, int b) {
    uintptr_t start_a = (uintptr_t)pointers[a];
    uintptr_t start_b = (uintptr_t)pointers[b];
    uint64_t bytes_a = TK_HOST(slots)[a].bytes;
    uint64_t bytes_b = TK_HOST(slots)[b].bytes;
    return bytes_a > 0 && bytes_b > 0 && start_a < start_b + bytes_b && start_b < start_a + bytes_a;
}

/* Fails on a null or misaligned pointer, and on a written tensor that shares memory with another. */
static int TK_HOST(check_pointers)(TK_HOST(handle) * handle, void* const* pointers) {
    int slot = 0;
    int other = 0;
    for (slot = 0; slot < TK_HOST_NUM_SLOTS; ++slot) {
        const TK_HOST(tensor)* tensor = &TK_HOST(slots)[slot];
        int written = slot >= TK_HOST_NUM_INPUTS || tensor->in_place;
        if (tensor->bytes > 0 && pointers[slot] == NULL) {
            snprintf(handle->message, sizeof handle->message, "%s: the pointer is null, %llu bytes are needed",
                     tensor->name, (unsigned long long)tensor->bytes);
            return TRAINKERNEL_ERROR_ARGUMENT;
        }
        if (tensor->bytes > 0 && (uintptr_t)pointers[slot] % tensor->alignment_bytes != 0) {
            snprintf(handle->message, sizeof handle->message, "%s: the address %p is not a multiple of %u bytes",
                     tensor->name, pointers[slot], (unsigned)tensor->alignment_bytes);
            return TRAINKERNEL_ERROR_ARGUMENT;
        }
        for (other = 0; written && other < TK_HOST_NUM_SLOTS; ++other) {
            if (other == slot || !TK_HOST(overlap)(pointers, slot, other)) continue;
            snprintf(handle->message, sizeof handle->message,
                     "%s is written by the launch and shares memory with %s; give each its own memory", tensor->name,
                     TK_HOST(slots)[other].name);
            return TRAINKERNEL_ERROR_ARGUMENT;
        }
    }
    return TRAINKERNEL_OK;
}

/* Takes over the launch's pointers; does nothing when they are those of the last launch. */
static int TK_HOST(set_pointers)(TK_HOST(handle) * handle, void* const* inputs, void* const* outputs, void* stream) {
    void* pointers[TK_HOST_NUM_SLOTS > 0 ? TK_HOST_NUM_SLOTS : 1];
    int code = TRAINKERNEL_OK;
    memset(pointers, 0, sizeof pointers);
    if (TK_HOST_NUM_INPUTS > 0) memcpy(pointers, inputs, TK_HOST_NUM_INPUTS * sizeof(void*));
    if (TK_HOST_NUM_OUTPUTS > 0) {
        memcpy(pointers + TK_HOST_NUM_INPUTS, outputs, TK_HOST_NUM_OUTPUTS * sizeof(void*));
    }
    if (handle->pointers_valid && memcmp(pointers, handle->pointers, sizeof pointers) == 0) return TRAINKERNEL_OK;
    handle->pointers_valid = 0;
    code = TK_HOST(check_pointers)(handle, pointers);
    if (code != TRAINKERNEL_OK) return code;
    memcpy(handle->pointers, pointers, sizeof pointers);
    if (TK_HOST_USES_TENSOR_TABLE) {
        /* Ordered on the stream, after earlier launches that read the old table. */
        TK_HOST_TRY(handle, "cuMemcpyHtoDAsync (tensor table)",
                    handle->driver.memcpy_htod_async(handle->table, handle->pointers, sizeof pointers, stream));
    } else {
        memcpy(handle->params + 2, pointers, TK_HOST_NUM_SLOTS * sizeof(void*));
    }
    handle->pointers_valid = 1;
    return TRAINKERNEL_OK;
}

/* Fails on an integer outside its bounds: a loop's length beyond them would leave the tensors. */
static int TK_HOST(check_scalars)(TK_HOST(handle) * handle, const TK_HOST(scalar) * scalars) {
    int i = 0;
    for (i = 0; i < TK_HOST_NUM_SCALARS; ++i) {
        const TK_HOST(scalar_description)* scalar = &TK_HOST(scalar_table)[i];
        if (!scalar->is_integer) continue;
        if (scalars[i].int32 >= scalar->minimum && scalars[i].int32 <= scalar->maximum) continue;
        snprintf(handle->message, sizeof handle->message, "%s: got %d, needs an integer from %d to %d", scalar->name,
                 (int)scalars[i].int32, (int)scalar->minimum, (int)scalar->maximum);
        return TRAINKERNEL_ERROR_ARGUMENT;
    }
    return TRAINKERNEL_OK;
}

/* Everything of launch that needs the context to be current. */
static int TK_HOST(enqueue)(TK_HOST(handle) * handle, void* const* inputs, void* const* outputs,
                            const TK_HOST(scalar) * scalars, void* stream) {
    TK_HOST(driver)* driver = &handle->driver;
    void* parameters[1];
    int scalar = 0;
    int result = 0;
    int code = TRAINKERNEL_OK;
    if (handle->launched && handle->stream != stream) {
        TK_HOST_TRY(handle, "cuCtxSynchronize (launch on another stream)", driver->ctx_synchronize());
    }
    code = TK_HOST(set_pointers)(handle, inputs, outputs, stream);
    if (code != TRAINKERNEL_OK) return code;
    for (scalar = 0; scalar < TK_HOST_NUM_SCALARS; ++scalar) {
        memcpy((unsigned char*)handle->params + TK_HOST(scalar_offsets)[scalar], &scalars[scalar], 4);
    }
    if (handle->header_dirty) {
        TK_HOST_TRY(handle, "cuMemsetD8Async (workspace header)",
                    driver->memset_d8_async(handle->workspace, 0, TK_HOST_HEADER_BYTES, stream));
        handle->header_dirty = 0;
    }
    handle->launched = 1;
    handle->stream = stream;
    parameters[0] = handle->params;
    result = driver->launch_cooperative(handle->function, (unsigned)handle->info.grid_blocks, 1, 1,
                                        TK_HOST_THREADS_PER_BLOCK, 1, 1, TK_HOST_SHARED_BYTES, stream, parameters);
    if (result != 0) handle->header_dirty = 1;
    TK_HOST_TRY(handle, "cuLaunchCooperativeKernel", result);
    return TRAINKERNEL_OK;
}

int TK_HOST(launch)(TK_HOST(handle) * handle, void* const* inputs, int num_inputs, void* const* outputs,
                    int num_outputs, const TK_HOST(scalar) * scalars, int num_scalars, void* stream) {
    int pushed = 0;
    int code = TRAINKERNEL_OK;
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    if (num_inputs != TK_HOST_NUM_INPUTS || num_outputs != TK_HOST_NUM_OUTPUTS || num_scalars != TK_HOST_NUM_SCALARS) {
        snprintf(handle->message, sizeof handle->message,
                 "the kernel takes %d inputs, %d outputs and %d scalars; got %d, %d and %d", TK_HOST_NUM_INPUTS,
                 TK_HOST_NUM_OUTPUTS, TK_HOST_NUM_SCALARS, num_inputs, num_outputs, num_scalars);
        return TRAINKERNEL_ERROR_ARGUMENT;
    }
    if ((num_inputs > 0 && inputs == NULL) || (num_outputs > 0 && outputs == NULL) ||
        (num_scalars > 0 && scalars == NULL)) {
        snprintf(handle->message, sizeof handle->message, "a null array of inputs, outputs or scalars was given");
        return TRAINKERNEL_ERROR_ARGUMENT;
    }
    code = TK_HOST(check_scalars)(handle, scalars);
    if (code == TRAINKERNEL_OK) code = TK_HOST(enter)(handle, &pushed);
    if (code != TRAINKERNEL_OK) return code;
    code = TK_HOST(enqueue)(handle, inputs, outputs, scalars, stream);
    TK_HOST(leave)(handle, pushed);
    return code;
}

/* Everything of check that needs the context to be current. */
static int TK_HOST(read_header)(TK_HOST(handle) * handle) {
    TK_HOST(driver)* driver = &handle->driver;
    uint32_t header[2] = {0, 0}; /* the barrier counter; 0, or 1 + the stage whose barrier timed out */
    uint32_t stage = 0;
    const char* name = NULL;
    TK_HOST_TRY(handle, "cuCtxSynchronize (this launch or earlier work)", driver->ctx_synchronize());
    TK_HOST_TRY(handle, "cuMemcpyDtoH (workspace header)", driver->memcpy_dtoh(header, handle->workspace, 8));
    if (header[1] == 0) return TRAINKERNEL_OK;
    stage = header[1] - 1;
    name = stage < (uint32_t)TK_HOST_NUM_STAGES ? TK_HOST(stage_names)[stage] : "";
    snprintf(handle->message, sizeof handle->message,
             "a grid barrier timed out at stage %u%s%s: not all %d blocks arrived within the barrier timeout. The "
             "in-place inputs and the outputs hold undefined values",
             (unsigned)stage, name[0] != 0 ? ", " : "", name, handle->info.grid_blocks);
    handle->header_dirty = 1; /* the next launch zeroes it */
    return TRAINKERNEL_ERROR_BARRIER_TIMEOUT;
}

int TK_HOST(check)(TK_HOST(handle) * handle) {
    int pushed = 0;
    int code = TRAINKERNEL_OK;
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    code = TK_HOST(enter)(handle, &pushed);
    if (code != TRAINKERNEL_OK) return code;
    code = TK_HOST(read_header)(handle);
    TK_HOST(leave)(handle, pushed);
    return code;
}

int TK_HOST(set_barrier_timeout)(TK_HOST(handle) * handle, uint64_t nanoseconds) {
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    memcpy(handle->params + 1, &nanoseconds, 8);
    return TRAINKERNEL_OK;
}

int TK_HOST(allocate)(TK_HOST(handle) * handle, size_t bytes, void** pointer) {
    int pushed = 0;
    int code = TRAINKERNEL_OK;
    int result = 0;
    TK_HOST(device_pointer) address = 0;
    if (handle == NULL || pointer == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    *pointer = NULL;
    if (bytes == 0) return TRAINKERNEL_OK; /* an empty tensor's pointer may be null */
    code = TK_HOST(enter)(handle, &pushed);
    if (code != TRAINKERNEL_OK) return code;
    result = handle->driver.mem_alloc(&address, bytes);
    TK_HOST(leave)(handle, pushed);
    TK_HOST_TRY(handle, "cuMemAlloc", result);
    *pointer = (void*)(uintptr_t)address;
    return TRAINKERNEL_OK;
}

int TK_HOST(free)(TK_HOST(handle) * handle, void* pointer) {
    int pushed = 0;
    int code = TRAINKERNEL_OK;
    int result = 0;
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    if (pointer == NULL) return TRAINKERNEL_OK;
    code = TK_HOST(enter)(handle, &pushed);
    if (code != TRAINKERNEL_OK) return code;
    result = handle->driver.mem_free((TK_HOST(device_pointer))(uintptr_t)pointer);
    TK_HOST(leave)(handle, pushed);
    TK_HOST_TRY(handle, "cuMemFree", result);
    return TRAINKERNEL_OK;
}

/* Copies after all earlier work of the context, to the device when host_from is given. */
static int TK_HOST(copy)(TK_HOST(handle) * handle, void* host_to, const void* host_from, uintptr_t device,
                         size_t bytes) {
    TK_HOST(driver)* driver = &handle->driver;
    int pushed = 0;
    int result = 0;
    int code = TK_HOST(enter)(handle, &pushed);
    if (code != TRAINKERNEL_OK) return code;
    result = driver->ctx_synchronize();
    if (result == 0) {
        result = host_from != NULL ? driver->memcpy_htod((TK_HOST(device_pointer))device, host_from, bytes)
                                   : driver->memcpy_dtoh(host_to, (TK_HOST(device_pointer))device, bytes);
    }
    /* A copy from pageable memory may return before it has landed. */
    if (result == 0 && host_from != NULL) result = driver->ctx_synchronize();
    TK_HOST(leave)(handle, pushed);
    TK_HOST_TRY(handle, host_from != NULL ? "cuMemcpyHtoD" : "cuMemcpyDtoH", result);
    return TRAINKERNEL_OK;
}

int TK_HOST(upload)(TK_HOST(handle) * handle, void* device, const void* host, size_t bytes) {
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    if (bytes == 0) return TRAINKERNEL_OK;
    if (device == NULL || host == NULL) {
        snprintf(handle->message, sizeof handle->message, "upload was given a null pointer");
        return TRAINKERNEL_ERROR_ARGUMENT;
    }
    return TK_HOST(copy)(handle, NULL, host, (uintptr_t)device, bytes);
}

int TK_HOST(download)(TK_HOST(handle) * handle, void* host, const void* device, size_t bytes) {
    if (handle == NULL) return TRAINKERNEL_ERROR_ARGUMENT;
    if (bytes == 0) return TRAINKERNEL_OK;
    if (device == NULL || host == NULL) {
        snprintf(handle->message, sizeof handle->message, "download was given a null pointer");
        return TRAINKERNEL_ERROR_ARGUMENT;
    }
    return TK_HOST(copy)(handle, host, NULL, (uintptr_t)device, bytes);
}

const char* TK_HOST(last_error)(const TK_HOST(handle) * handle) {
    return handle != NULL ? handle->message : "no handle";
}

int TK_HOST(destroy)(TK_HOST(handle) * handle) {
    int pushed = 0;
    int result = 0;
    int code = TRAINKERNEL_OK;
    if (handle == NULL) return TRAINKERNEL_OK;
    code = TK_HOST(enter)(handle, &pushed);
    if (code == TRAINKERNEL_OK) {
        result = TK_HOST(unload)(handle);
        TK_HOST(leave)(handle, pushed);
    }
    if (handle->retained_primary) {
        int released = handle->driver.primary_ctx_release(handle->info.device);
        if (result == 0) result = released;
    }
    free(handle);
    return code != TRAINKERNEL_OK || result == 0 ? code : TRAINKERNEL_ERROR_DRIVER;
}
