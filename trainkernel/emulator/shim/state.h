// The state of the launch in progress. One launch runs at a time (launch.py holds a lock), on one
// host thread, so plain globals do.
#pragma once

#include <stdlib.h>
#include <string.h>

template <typename T>
struct Array {
    T* data = nullptr;
    u64 size = 0;
    u64 capacity = 0;

    void push(const T& value) {
        if (size == capacity) {
            capacity = capacity ? capacity * 2 : 64;
            data = static_cast<T*>(realloc(data, capacity * sizeof(T)));
            if (!data) abort();
        }
        data[size++] = value;
    }
    void release() {
        free(data);
        data = nullptr;
        size = capacity = 0;
    }
    T& operator[](u64 index) { return data[index]; }
};

struct Fiber;
struct Cell;

struct AsyncCopy {
    u8* shared;
    const u8* global;
    u32 bytes;
    u32 group;
};

// A barrier in shared memory for copies that arrive by themselves.
struct Arrival {
    u8* at;
    u32 count;
    u32 pending;
    u32 phases;  // completed
    long long bytes;  // announced, but not those of copies that have started
};

struct BulkCopy {
    u8* shared;
    const u8* global;
    u32 bytes;
    u32 arrival;
    u32 phase;
    Access start;
};

// A wgmma's matrix in shared memory, as its descriptor tells.
struct Matrix {
    const u8* start;
    u32 part_bytes;
    u32 rows_bytes;
    u32 across;
};

struct AsyncProduct {
    float* d;
    Matrix a;
    Matrix b;
    u32 columns;
    u32 format;  // 0: float16, 1: bfloat16, 2: TF32
    u32 adds;
    u32 group;
};

struct Block {
    u32 index;
    u32 waiting;        // fibers at the block barrier
    u32 cluster_waiting;  // fibers at the cluster barrier
    u32 exited;
    u32 votes;          // any thread at the block barrier voted nonzero
    u32 verdict;        // of the latest block barrier
    u32 generation;     // block barriers passed
    u32 grid_arrivals;
    Fiber* arriver;           // the thread of the latest grid arrival
    u32 arriver_epoch;        // its epoch just after
    bool acquired;            // whether it has polled since all had arrived
    u32 acquire_generation;   // the block generation at that poll
    u8* shared;
    Cell* shared_shadow;
    Fiber** order;            // the block's fibers in the order in which a barrier releases them
    u32* cluster_published;   // [cluster_blocks]: generation of each block at the latest cluster barrier
    Array<u32> published;     // [grid arrival]: block generation then
    Array<Arrival> arrivals;
    Array<BulkCopy> bulk;     // started, and nobody has waited for them
};

struct Warp {
    Fiber* lanes[32];
    u32 present;
    u32 exited;
    u32 waiting;
};

struct Fiber {
    void* stack_pointer;
    uptr stack_low;
    Block* block;
    Warp* warp;
    // Race checking: the interned context of its accesses, valid for one block generation.
    u32 context;
    u32 context_generation;
    u32 index;         // over the grid
    u32 thread;        // in the block
    u32 lane;
    u32 epoch;         // warp syncs passed
    u32 grid_seen;     // grid barriers passed
    u32 fenced;        // 1 + the block generation of its latest fence for bulk copies
    u16 task;
    u16 stage;
    u32 wait;
    u32 wait_mask;
    // Operands of the warp operation that it waits in: they live on its stack.
    void* operands[3];
    u32 value;
    u32 argument;
    u32 async_group;
    Array<AsyncCopy> async;
    u32 product_group;
    Array<AsyncProduct> products;
    u32 seen[32];      // per lane of its warp: the latest epoch that is ordered before it
};

static Request* request = nullptr;
static Fiber* current = nullptr;
static Fiber* fibers = nullptr;
static Block* blocks = nullptr;
static Warp* warps = nullptr;
static u32 num_fibers = 0;
static u32 warps_per_block = 0;
static u32 live_fibers = 0;
static void* main_stack_pointer = nullptr;
static u64 virtual_time_ns = 0;
static u64 idle_polls = 0;
static Array<u32> blocks_arrived;   // [grid barrier]: blocks that have arrived at it
static u8* shared_base = nullptr;
static u64 shared_stride = 0;
static Fiber** ready = nullptr;     // ring buffer
static u32 ready_head = 0;
static u32 ready_count = 0;

static Access access_of(const Fiber* fiber, bool is_write) {
    Access access = {fiber->block->index, fiber->thread, fiber->task, fiber->stage, is_write ? 1u : 0u, fiber->wait};
    return access;
}

// Fold into an existing report of the same kind, region and pair of tasks, or add one.
static Report* add_report(const Report& report) {
    for (u32 i = 0; i < request->num_reports; i++) {
        Report* known = &request->reports[i];
        if (known->kind == report.kind && known->region == report.region && known->first.task == report.first.task &&
            known->second.task == report.second.task && known->first.is_write == report.first.is_write &&
            known->second.is_write == report.second.is_write) {
            known->count += report.count;
            return known;
        }
    }
    if (request->num_reports == MAX_REPORTS) return nullptr;
    Report* added = &request->reports[request->num_reports++];
    *added = report;
    return added;
}

// End the launch: every fiber is abandoned where it stands.
[[noreturn]] static void fatal(Report report) {
    report.count = 1;
    if (request->num_reports == MAX_REPORTS) request->num_reports--;
    request->reports[request->num_reports++] = report;
    void* abandoned;
    current = nullptr;
    tk_emu_switch(&abandoned, main_stack_pointer);
    __builtin_unreachable();
}

[[noreturn]] static void fatal_at(Kind kind, Fiber* fiber, u32 detail = 0) {
    Report report = {};
    report.kind = kind;
    report.region = REGION_NONE;
    report.detail = detail;
    report.first = access_of(fiber, false);
    fatal(report);
}
