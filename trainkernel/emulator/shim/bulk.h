// Bulk copies and the barriers in shared memory on which they arrive.
#pragma once

static Arrival* find_arrival(const void* mbarrier) {
    Array<Arrival>& arrivals = current->block->arrivals;
    for (u64 i = 0; i < arrivals.size; i++)
        if (arrivals[i].at == mbarrier) return &arrivals[i];
    fatal_access(KIND_OUT_OF_BOUNDS, current, reinterpret_cast<uptr>(mbarrier), 8, true, REGION_SHARED);
}

// A phase ends when all have arrived and every announced byte has started: here nothing is lost on its way.
static void check_arrival(Arrival* arrival) {
    if (arrival->pending || arrival->bytes) return;
    arrival->phases++;
    arrival->pending = arrival->count;
    idle_polls = 0;
}

TK_EXPORT void tk_emu_mbarrier_init(void* mbarrier, u32 count) {
    Block* block = current->block;
    uptr at = reinterpret_cast<uptr>(mbarrier);
    if (at % 8) fatal_access(KIND_MISALIGNED, current, at, 8, true, REGION_SHARED);
    if (at - reinterpret_cast<uptr>(block->shared) + 8 > request->shared_bytes)
        fatal_access(KIND_OUT_OF_BOUNDS, current, at, 8, true, REGION_SHARED);
    access(at, 8, true);
    Arrival arrival = {static_cast<u8*>(mbarrier), count, count, 0, 0};
    block->arrivals.push(arrival);
}

TK_EXPORT void tk_emu_mbarrier_arrive(void* mbarrier, u32 bytes) {
    access(reinterpret_cast<uptr>(mbarrier), 8, false);
    Arrival* arrival = find_arrival(mbarrier);
    arrival->bytes += bytes;
    arrival->pending--;
    check_arrival(arrival);
}

// What the block did before its latest barrier has happened for the copies that this thread starts from now on.
TK_EXPORT void tk_emu_fence_async() { current->fenced = current->block->generation + 1; }

// As for cp.async, the destination is poison and its shadow "in flight" until somebody waits.
TK_EXPORT void tk_emu_bulk_copy(void* shared, const void* global, u32 bytes, void* mbarrier) {
    Fiber* fiber = current;
    uptr to = reinterpret_cast<uptr>(shared), from = reinterpret_cast<uptr>(global);
    if (to % 16 || bytes % 16) fatal_access(KIND_MISALIGNED, fiber, to, bytes, true, REGION_SHARED);
    if (from % 16) fatal_access(KIND_MISALIGNED, fiber, from, bytes, false, find_region(from));
    if (to - reinterpret_cast<uptr>(fiber->block->shared) + bytes > request->shared_bytes)
        fatal_access(KIND_OUT_OF_BOUNDS, fiber, to, bytes, true, REGION_SHARED);
    if (fiber->fenced != fiber->block->generation + 1)
        fatal_access(KIND_UNFENCED, fiber, to, bytes, true, REGION_SHARED);
    access(reinterpret_cast<uptr>(mbarrier), 8, false);
    Arrival* arrival = find_arrival(mbarrier);
    for (u32 i = 0; i < bytes; i += 16) {
        access(from + i, 16, false);
        access(to + i, 16, true, WRITER_ASYNC);
    }
    memset(shared, 0xff, bytes);
    u32 number = u32(arrival - fiber->block->arrivals.data);
    Access start = access_of(fiber, true);
    BulkCopy copy = {static_cast<u8*>(shared), static_cast<const u8*>(global), bytes, number, arrival->phases, start};
    fiber->block->bulk.push(copy);
    arrival->bytes -= bytes;
    check_arrival(arrival);
}

TK_EXPORT void tk_emu_mbarrier_wait(void* mbarrier, u32 parity) {
    Fiber* fiber = current;
    access(reinterpret_cast<uptr>(mbarrier), 8, false);
    Block* block = fiber->block;
    Arrival* arrival = find_arrival(mbarrier);
    while ((arrival->phases & 1) == parity) poll();
    u32 number = u32(arrival - block->arrivals.data);
    u64 kept = 0;
    for (u64 i = 0; i < block->bulk.size; i++) {
        BulkCopy copy = block->bulk[i];
        if (copy.arrival == number && copy.phase < arrival->phases)
            land(fiber, copy.shared, copy.global, copy.bytes);
        else
            block->bulk[kept++] = copy;
    }
    block->bulk.size = kept;
}
