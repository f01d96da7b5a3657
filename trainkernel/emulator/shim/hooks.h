// From an address to its shadow, and the hooks that -fsanitize=thread calls before each access.
#pragma once

[[noreturn]] static void fatal_access(Kind kind, Fiber* fiber, uptr address, u32 size, bool is_write, u32 region) {
    Report report = {};
    report.kind = kind;
    report.region = region;
    report.address = address;
    report.size = size;
    if (region < request->num_regions) report.offset = address - request->regions[region].address;
    report.first = access_of(fiber, is_write);
    fatal(report);
}

static u32 find_region(uptr address) {
    u32* cached = &region_cache[(address >> 7) % REGION_CACHE];
    const Region* regions = request->regions;
    if (*cached < request->num_regions && address - regions[*cached].address < regions[*cached].size) return *cached;
    u32 low = 0, high = request->num_regions;  // the last region that starts at or before the address
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (regions[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    if (!low || address - regions[low - 1].address >= regions[low - 1].size) return REGION_NONE;
    return *cached = low - 1;
}

// Whether the address lies in the program's own object: its constants. An object has its pages for itself, so what the
// loader said of one address holds for its page; it takes long to answer where many objects are loaded.
static bool in_program(uptr address) {
    uptr* known = &program_pages[(address >> PAGE_BITS) % PAGE_CACHE];
    if (*known == address >> PAGE_BITS) return true;
    Dl_info at, program;
    bool found = dladdr(reinterpret_cast<void*>(address), &at) && at.dli_fbase &&
                 dladdr(reinterpret_cast<void*>(request->entry), &program) && at.dli_fbase == program.dli_fbase;
    if (found) *known = address >> PAGE_BITS;
    return found;
}

// Distributed shared memory: another block of the cluster, alive.
static Place remote_shared(Fiber* fiber, uptr address, u32 size, bool is_write) {
    uptr base = reinterpret_cast<uptr>(shared_base);
    uptr end = base + u64(request->num_blocks) * shared_stride;
    if (!request->shared_bytes || address < base || address >= end)
        fatal_access(KIND_OUT_OF_BOUNDS, fiber, address, size, is_write, REGION_NONE);
    Block* owner = &blocks[(address - base) / shared_stride];
    u64 offset = (address - base) % shared_stride;
    u32 cluster = request->cluster_blocks;
    bool same_cluster = owner->index / cluster == fiber->block->index / cluster;
    if (!same_cluster || offset + size > request->shared_bytes) {
        Report report = {};
        report.kind = KIND_OUT_OF_BOUNDS;
        report.region = REGION_SHARED;
        report.address = address;
        report.offset = address - reinterpret_cast<uptr>(fiber->block->shared);
        report.size = size;
        report.first = access_of(fiber, is_write);
        fatal(report);
    }
    if (owner->exited == request->threads_per_block)
        fatal_access(KIND_EXITED_BLOCK, fiber, address, size, is_write, REGION_NONE);
    return {owner->shared_shadow + offset, REGION_SHARED, false, offset};
}

static inline __attribute__((always_inline)) void access(uptr address, u32 size, bool is_write, u32 writer = 0) {
    Fiber* fiber = current;
    if (!fiber || !race_checks) return;
    if (address - fiber->stack_low < STACK_BYTES) return;
    u64 offset = address - reinterpret_cast<uptr>(fiber->block->shared);
    Place place;
    if (offset < request->shared_bytes && offset + size <= request->shared_bytes) {
        place = {fiber->block->shared_shadow + offset, REGION_SHARED, false, offset};
    } else {
        u32 index = find_region(address);
        if (index == REGION_NONE) {
            if (!is_write && in_program(address)) return;
            place = remote_shared(fiber, address, size, is_write);
        } else {
            const Region& region = request->regions[index];
            offset = address - region.address;
            if (offset + size > region.size) fatal_access(KIND_OUT_OF_BOUNDS, fiber, address, size, is_write, index);
            if (region.flags & REGION_EXEMPT) return;
            if (is_write && (region.flags & REGION_READ_ONLY))
                fatal_access(KIND_READ_ONLY, fiber, address, size, is_write, index);
            place = {region_shadow[index] + offset, index, (region.flags & REGION_INITIALISED) != 0, offset};
        }
    }
    if (is_write) write_cells(fiber, place, size, writer);
    else read_cells(fiber, place, size);
}

static inline __attribute__((always_inline)) void access_aligned(uptr address, u32 size, bool is_write) {
    if (current && address % size) fatal_access(KIND_MISALIGNED, current, address, size, is_write, find_region(address));
    access(address, size, is_write);
}

#define TK_HOOK extern "C" __attribute__((visibility("default")))
#define TK_ACCESS_HOOKS(size)                                                                                      \
    TK_HOOK void __tsan_read##size(void* address) { access_aligned(reinterpret_cast<uptr>(address), size, false); } \
    TK_HOOK void __tsan_write##size(void* address) { access_aligned(reinterpret_cast<uptr>(address), size, true); } \
    TK_HOOK void __tsan_volatile_read##size(void* address) { __tsan_read##size(address); }                         \
    TK_HOOK void __tsan_volatile_write##size(void* address) { __tsan_write##size(address); }                       \
    TK_HOOK void __tsan_unaligned_read##size(void* address) { access(reinterpret_cast<uptr>(address), size, false); } \
    TK_HOOK void __tsan_unaligned_write##size(void* address) { access(reinterpret_cast<uptr>(address), size, true); } \
    TK_HOOK void __tsan_read_write##size(void* address) {                                                          \
        __tsan_read##size(address);                                                                                \
        __tsan_write##size(address);                                                                               \
    }
TK_ACCESS_HOOKS(1)
TK_ACCESS_HOOKS(2)
TK_ACCESS_HOOKS(4)
TK_ACCESS_HOOKS(8)
TK_ACCESS_HOOKS(16)

TK_HOOK void __tsan_init() {}
TK_HOOK void __tsan_func_entry(void*) {}
TK_HOOK void __tsan_func_exit() {}
TK_HOOK void __tsan_read_range(void* address, uptr size) { access(reinterpret_cast<uptr>(address), u32(size), false); }
TK_HOOK void __tsan_write_range(void* address, uptr size) { access(reinterpret_cast<uptr>(address), u32(size), true); }
TK_HOOK void __tsan_vptr_update(void**, void*) {}
TK_HOOK void __tsan_vptr_read(void**) {}
TK_HOOK void* __tsan_memcpy(void* to, const void* from, uptr size) {
    access(reinterpret_cast<uptr>(from), u32(size), false);
    access(reinterpret_cast<uptr>(to), u32(size), true);
    return memcpy(to, from, size);
}
TK_HOOK void* __tsan_memmove(void* to, const void* from, uptr size) {
    access(reinterpret_cast<uptr>(from), u32(size), false);
    access(reinterpret_cast<uptr>(to), u32(size), true);
    return memmove(to, from, size);
}
TK_HOOK void* __tsan_memset(void* to, int value, uptr size) {
    access(reinterpret_cast<uptr>(to), u32(size), true);
    return memset(to, value, size);
}

// Compiler builtins for atomics: they order nothing here, and do not race.
#define TK_ATOMIC_HOOKS(bits, type)                                                                              \
    TK_HOOK type __tsan_atomic##bits##_load(const volatile type* a, int) { return *a; }                          \
    TK_HOOK void __tsan_atomic##bits##_store(volatile type* a, type value, int) { *a = value; }                  \
    TK_HOOK type __tsan_atomic##bits##_exchange(volatile type* a, type value, int) {                             \
        type old = *a;                                                                                           \
        *a = value;                                                                                              \
        return old;                                                                                              \
    }                                                                                                            \
    TK_HOOK type __tsan_atomic##bits##_fetch_add(volatile type* a, type value, int) {                            \
        type old = *a;                                                                                           \
        *a = old + value;                                                                                        \
        return old;                                                                                              \
    }
TK_ATOMIC_HOOKS(32, u32)
TK_ATOMIC_HOOKS(64, u64)
TK_HOOK void __tsan_atomic_thread_fence(int) {}

// -fsanitize=alignment: a vector access that the host's compiler would split is one access on the
// device and must be aligned as a whole.
struct AlignmentData {
    const char* file;
    u32 line, column;
    const void* type;
    u8 log_alignment;
    u8 kind;  // 1: a store
};
TK_HOOK void __ubsan_handle_type_mismatch_v1(AlignmentData* data, uptr address) {
    if (!current) return;
    fatal_access(KIND_MISALIGNED, current, address, 1u << data->log_alignment, data->kind == 1, find_region(address));
}
TK_HOOK void __ubsan_handle_type_mismatch_v1_abort(AlignmentData* data, uptr address) {
    __ubsan_handle_type_mismatch_v1(data, address);
}
