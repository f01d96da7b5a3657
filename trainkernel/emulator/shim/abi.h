// What Python (launch.py) and the emulator's runtime exchange. Every field has its natural
// alignment, so that the ctypes structures there and the structures here agree on any 64-bit host.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef __UINTPTR_TYPE__ uptr;

enum RegionFlag : u32 {
    REGION_INITIALISED = 1,  // holds values before the launch, so that reading it first is no error
    REGION_READ_ONLY = 2,    // a write is an error
    REGION_EXEMPT = 4,       // barrier counters: touched by atomics, not checked for races
    REGION_ARENA = 8,        // counted in arena_touched_bytes
    REGION_OUTPUT = 16,      // every byte must be written by the end
};

struct Region {
    u64 address;
    u64 size;
    u32 flags;
    u32 unused;
    u8* written;  // null, or for each byte whether this launch or one before it wrote there
};

enum Kind : u32 {
    KIND_RACE = 1,
    KIND_UNINITIALISED = 2,
    KIND_ASYNC_PENDING = 3,   // cp.async data touched before its wait
    KIND_UNWRITTEN = 4,       // an output byte that nobody wrote
    KIND_UNAWAITED = 5,       // a bulk copy that may arrive after its block has left
    // The kinds from here on end the launch at once.
    KIND_OUT_OF_BOUNDS = 16,
    KIND_READ_ONLY = 17,
    KIND_MISALIGNED = 18,
    KIND_DEADLOCK = 19,
    KIND_DIVERGENT_BLOCK = 20,
    KIND_DIVERGENT_WARP = 21,
    KIND_DISHONEST_BARRIER = 22,
    KIND_STACK_OVERFLOW = 23,
    KIND_SEGMENTATION = 24,
    KIND_EXITED_BLOCK = 25,   // distributed shared memory of a block that has exited
    KIND_MEMORY = 26,         // the host has no memory left for stacks or shadow
    KIND_UNFENCED = 27,       // a bulk copy that may overtake what its thread has seen happen
};

enum Wait : u32 {
    WAIT_NONE = 0,
    WAIT_BLOCK = 1,
    WAIT_CLUSTER = 2,
    WAIT_SYNCWARP = 3,
    WAIT_SHUFFLE = 4,
    WAIT_MMA = 5,
    WAIT_LDMATRIX = 6,
    WAIT_POLL = 7,
};

static const u32 NO_TASK = 0xffff;
static const u32 REGION_NONE = 0xffffffff;
static const u32 REGION_SHARED = 0xfffffffe;

struct Access {
    u32 block;
    u32 thread;
    u32 task;
    u32 stage;
    u32 is_write;
    u32 wait;
};

struct Report {
    u32 kind;
    u32 region;    // index into Request.regions, REGION_SHARED or REGION_NONE
    u64 offset;    // bytes from the region's (or the block's shared memory's) start
    u64 address;
    u64 count;     // byte accesses folded into this report
    u32 size;      // of the access, bytes
    u32 detail;
    Access first;  // the earlier access, or the only one
    Access second;
};

static const u32 MAX_REPORTS = 64;

struct Request {
    void (*entry)(const void* params);
    const void* params;
    const u32* barrier_error;  // the workspace header's word, or null
    const Region* regions;     // sorted by address, disjoint
    u32 num_regions;
    u32 num_blocks;
    u32 threads_per_block;
    u32 cluster_blocks;
    u32 shared_bytes;
    u32 order;                 // 0 forward, 1 reverse, 2 seeded
    u64 seed;
    u64 idle_rounds;           // polling rounds without progress that count as a deadlock
    u32 check_races;
    u32 num_tasks;
    // Results.
    u32 num_reports;
    u32 grid_barriers_min;
    u32 grid_barriers_max;
    u32 shared_overrun;        // 1 + the block whose redzone was written, 0: none
    u64 races;                 // total byte accesses that raced
    u64 block_barriers;
    u64 arena_touched_bytes;
    u32* task_blocks;          // [num_tasks]: blocks that touched memory in the task
    Report reports[MAX_REPORTS];
};
