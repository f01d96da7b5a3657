/* Trains from C: main STEP.cubin INITIAL.bin FINAL.bin, with the step's source linked in.
 *
 * TRAINKERNEL_STEP_SOURCE is the generated file, included here for its declarations only.
 * INITIAL.bin, little-endian:
 *     8 bytes "TKSTART1"; uint32 steps, inputs, outputs, scalars;
 *     per input: uint64 bytes, then the bytes;
 *     per scalar: float64 base, float64 increment. At step t = 0, 1, ... its value is
 *     base + t * increment, computed in float64 and rounded once to its dtype.
 * FINAL.bin: 8 bytes "TKFINAL1"; per input, then per output: uint64 bytes, then the bytes.
 * Exit status: 0, or a code of the host entry, or 100 for a wrong file or command line.
 */
#define TRAINKERNEL_DECLARATIONS_ONLY
#include TRAINKERNEL_STEP_SOURCE
#undef TRAINKERNEL_DECLARATIONS_ONLY

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TENSORS 4096
#define MAX_SCALARS 256
#define WRONG_FILE 100

static trainkernel_handle* handle;
static void* inputs[MAX_TENSORS];
static void* outputs[MAX_TENSORS];
static trainkernel_scalar scalars[MAX_SCALARS];
static double bases[MAX_SCALARS];
static double increments[MAX_SCALARS];

static int wrong_file(const char* what) {
    fprintf(stderr, "host_entry_main: %s\n", what);
    return WRONG_FILE;
}

static int failed(int code) {
    fprintf(stderr, "host_entry_main: error %d: %s\n", code, trainkernel_last_error(handle));
    return code;
}

static unsigned char* read_file(const char* path, size_t* bytes) {
    FILE* file = fopen(path, "rb");
    unsigned char* content = NULL;
    long size = 0;
    if (file == NULL) return NULL;
    if (fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    rewind(file);
    content = (unsigned char*)malloc(size > 0 ? (size_t)size : 1);
    if (content != NULL && fread(content, 1, (size_t)size, file) != (size_t)size) {
        free(content);
        content = NULL;
    }
    fclose(file);
    *bytes = (size_t)size;
    return content;
}

static int allocate(const trainkernel_tensor* tensors, int num_tensors, void** pointers) {
    int i = 0;
    for (i = 0; i < num_tensors; ++i) {
        int code = trainkernel_allocate(handle, (size_t)tensors[i].bytes, &pointers[i]);
        if (code != TRAINKERNEL_OK) return failed(code);
    }
    return 0;
}

/* Uploads the inputs and reads the scalar rules. */
static int read_initial(const unsigned char* data, size_t data_bytes) {
    int num_inputs = 0;
    int num_scalars = 0;
    int i = 0;
    size_t at = 24;
    const trainkernel_tensor* tensors = trainkernel_inputs(&num_inputs);
    (void)trainkernel_scalars(&num_scalars);
    for (i = 0; i < num_inputs; ++i) {
        uint64_t bytes = 0;
        int code = 0;
        if (data_bytes - at < 8) return wrong_file("the initial file ends early");
        memcpy(&bytes, data + at, 8);
        at += 8;
        if (bytes != tensors[i].bytes) return wrong_file("an input has another size than the kernel's");
        if (data_bytes - at < bytes) return wrong_file("the initial file ends early");
        code = trainkernel_upload(handle, inputs[i], data + at, (size_t)bytes);
        if (code != TRAINKERNEL_OK) return failed(code);
        at += (size_t)bytes;
    }
    for (i = 0; i < num_scalars; ++i) {
        if (data_bytes - at < 16) return wrong_file("the initial file ends early");
        memcpy(&bases[i], data + at, 8);
        memcpy(&increments[i], data + at + 8, 8);
        at += 16;
    }
    return at == data_bytes ? 0 : wrong_file("the initial file goes on after its end");
}

static int train(uint32_t num_steps) {
    int num_inputs = 0;
    int num_outputs = 0;
    int num_scalars = 0;
    int i = 0;
    uint32_t step = 0;
    const trainkernel_scalar_description* descriptions = trainkernel_scalars(&num_scalars);
    (void)trainkernel_inputs(&num_inputs);
    (void)trainkernel_outputs(&num_outputs);
    for (step = 0; step < num_steps; ++step) {
        int code = 0;
        for (i = 0; i < num_scalars; ++i) {
            double value = bases[i] + (double)step * increments[i];
            if (descriptions[i].is_integer) {
                scalars[i].int32 = (int32_t)value;
            } else {
                scalars[i].float32 = (float)value;
            }
        }
        code = trainkernel_launch(handle, inputs, num_inputs, outputs, num_outputs, scalars, num_scalars, NULL);
        if (code != TRAINKERNEL_OK) return failed(code);
    }
    i = trainkernel_check(handle);
    return i == TRAINKERNEL_OK ? 0 : failed(i);
}

static int write_tensors(FILE* file, const trainkernel_tensor* tensors, int num_tensors, void** pointers) {
    int i = 0;
    for (i = 0; i < num_tensors; ++i) {
        size_t bytes = (size_t)tensors[i].bytes;
        unsigned char* content = (unsigned char*)malloc(bytes > 0 ? bytes : 1);
        int code = content != NULL ? trainkernel_download(handle, content, pointers[i], bytes) : WRONG_FILE;
        if (code == TRAINKERNEL_OK && fwrite(&tensors[i].bytes, 8, 1, file) != 1) code = WRONG_FILE;
        if (code == TRAINKERNEL_OK && fwrite(content, 1, bytes, file) != bytes) code = WRONG_FILE;
        free(content);
        if (code == WRONG_FILE) return wrong_file("the final file cannot be written");
        if (code != TRAINKERNEL_OK) return failed(code);
    }
    return 0;
}

static int write_final(const char* path) {
    int num_inputs = 0;
    int num_outputs = 0;
    int code = 0;
    const trainkernel_tensor* input_tensors = trainkernel_inputs(&num_inputs);
    const trainkernel_tensor* output_tensors = trainkernel_outputs(&num_outputs);
    FILE* file = fopen(path, "wb");
    if (file == NULL || fwrite("TKFINAL1", 8, 1, file) != 1) return wrong_file("the final file cannot be written");
    code = write_tensors(file, input_tensors, num_inputs, inputs);
    if (code == 0) code = write_tensors(file, output_tensors, num_outputs, outputs);
    if (fclose(file) != 0 && code == 0) code = wrong_file("the final file cannot be written");
    return code;
}

static int run(const unsigned char* initial, size_t initial_bytes, const char* final_path) {
    int num_inputs = 0;
    int num_outputs = 0;
    int num_scalars = 0;
    int code = 0;
    uint32_t counts[4] = {0, 0, 0, 0};
    const trainkernel_tensor* input_tensors = trainkernel_inputs(&num_inputs);
    const trainkernel_tensor* output_tensors = trainkernel_outputs(&num_outputs);
    (void)trainkernel_scalars(&num_scalars);
    if (initial_bytes < 24 || memcmp(initial, "TKSTART1", 8) != 0) return wrong_file("not an initial file");
    memcpy(counts, initial + 8, 16);
    if (counts[1] != (uint32_t)num_inputs || counts[2] != (uint32_t)num_outputs ||
        counts[3] != (uint32_t)num_scalars || num_inputs > MAX_TENSORS || num_outputs > MAX_TENSORS ||
        num_scalars > MAX_SCALARS) {
        return wrong_file("the initial file is for another kernel");
    }
    code = trainkernel_set_barrier_timeout(handle, 10000000000ull);
    if (code == 0) code = allocate(input_tensors, num_inputs, inputs);
    if (code == 0) code = allocate(output_tensors, num_outputs, outputs);
    if (code == 0) code = read_initial(initial, initial_bytes);
    if (code == 0) code = train(counts[0]);
    if (code == 0) code = write_final(final_path);
    for (num_inputs -= 1; num_inputs >= 0; --num_inputs) (void)trainkernel_free(handle, inputs[num_inputs]);
    for (num_outputs -= 1; num_outputs >= 0; --num_outputs) (void)trainkernel_free(handle, outputs[num_outputs]);
    return code;
}

int main(int argc, char** argv) {
    char message[512];
    size_t cubin_bytes = 0;
    size_t initial_bytes = 0;
    unsigned char* cubin = NULL;
    unsigned char* initial = NULL;
    trainkernel_info info;
    int code = 0;
    if (argc != 4) return wrong_file("usage: main STEP.cubin INITIAL.bin FINAL.bin");
    cubin = read_file(argv[1], &cubin_bytes);
    initial = read_file(argv[2], &initial_bytes);
    if (cubin == NULL || initial == NULL) {
        code = wrong_file("a file cannot be read");
    } else {
        code = trainkernel_init(&handle, cubin, cubin_bytes, message, sizeof message);
        if (code != TRAINKERNEL_OK) fprintf(stderr, "host_entry_main: error %d: %s\n", code, message);
    }
    if (code == 0) {
        (void)trainkernel_query(handle, &info);
        printf("sm_%d, %d SMs, grid %d x %d, %d registers, %llu bytes of workspace\n", info.compute_capability,
               info.num_sms, info.grid_blocks, info.threads_per_block, info.registers_per_thread,
               (unsigned long long)info.workspace_bytes);
        code = run(initial, initial_bytes, argv[3]);
        if (trainkernel_destroy(handle) != TRAINKERNEL_OK && code == 0) code = TRAINKERNEL_ERROR_DRIVER;
    }
    free(cubin);
    free(initial);
    return code;
}
