// Who runs next; barriers of block, cluster and grid; polling; the end of a thread.
#pragma once

#define TK_EXPORT extern "C" __attribute__((visibility("default")))

static void make_ready(Fiber* fiber) {
    u32 slot = ready_head + ready_count++;
    if (slot >= num_fibers) slot -= num_fibers;
    ready[slot] = fiber;
}

// A pseudo-random number for the seeded order (xorshift64*).
static u64 random_state = 1;
static u32 next_random(u32 bound) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return u32((random_state * 0x2545f4914f6cdd1dull >> 33) % bound);
}

// All threads are blocked: say which one waits for what (the first, and how many).
static Report deadlock_report() {
    Report report = {};
    report.kind = KIND_DEADLOCK;
    report.region = REGION_NONE;
    bool found = false;
    for (u32 i = 0; i < num_fibers; i++) {
        if (fibers[i].wait == WAIT_NONE) continue;
        report.detail++;
        // A poller tells most: the others of its block merely wait for it.
        if (!found || (fibers[i].wait == WAIT_POLL && report.first.wait != WAIT_POLL)) {
            if (found) report.second = report.first;
            report.first = access_of(&fibers[i], false);
            if (!found) report.second = report.first;
            found = true;
        } else if (report.second.wait == report.first.wait && fibers[i].wait != report.first.wait) {
            report.second = access_of(&fibers[i], false);
        }
    }
    return report;
}

// Leave the current fiber (already queued, blocked or finished) and run the next ready one.
static void run_next() {
    Fiber* from = current;
    if (*reinterpret_cast<u64*>(from->stack_low) != STACK_CANARY) fatal_at(KIND_STACK_OVERFLOW, from);
    if (!ready_count) {
        if (live_fibers) fatal(deadlock_report());
        current = nullptr;
        tk_emu_switch(&from->stack_pointer, main_stack_pointer);
        return;
    }
    Fiber* next = ready[ready_head];
    if (++ready_head == num_fibers) ready_head = 0;
    ready_count--;
    if (next == from) return;
    current = next;
    tk_emu_switch(&from->stack_pointer, next->stack_pointer);
}

static void release_block(Block* block, Wait wait) {
    u32 threads = request->threads_per_block;
    block->generation++;
    (wait == WAIT_BLOCK ? block->waiting : block->cluster_waiting) = 0;
    u32 start = request->order == 2 ? next_random(threads) : 0;
    for (u32 i = 0; i < threads; i++) {
        u32 slot = start + i < threads ? start + i : start + i - threads;
        Fiber* fiber = block->order[slot];
        if (fiber->wait != wait) continue;
        fiber->wait = WAIT_NONE;
        make_ready(fiber);
    }
}

static bool barrier_failed() { return request->barrier_error && *request->barrier_error; }

// After an arrival or an exit: release the block's barrier if all its threads are there.
static void check_block_barrier(Block* block) {
    if (!block->waiting || block->waiting + block->exited != request->threads_per_block) return;
    if (block->exited && !barrier_failed()) {
        Report report = {};
        report.kind = KIND_DIVERGENT_BLOCK;
        report.region = REGION_NONE;
        report.detail = block->exited;
        for (u32 i = 0; i < request->threads_per_block; i++) {
            Fiber* other = &fibers[u64(block->index) * request->threads_per_block + i];
            if (other->wait == WAIT_BLOCK) report.first = access_of(other, false);
            else report.second = access_of(other, false);
        }
        fatal(report);
    }
    request->block_barriers++;
    block->verdict = block->votes;
    block->votes = 0;
    release_block(block, WAIT_BLOCK);
}

TK_EXPORT void tk_emu_syncthreads() {
    Fiber* fiber = current;
    idle_polls = 0;
    fiber->wait = WAIT_BLOCK;
    fiber->block->waiting++;
    check_block_barrier(fiber->block);
    run_next();
}

TK_EXPORT u32 tk_emu_syncthreads_or(u32 vote) {
    Block* block = current->block;
    block->votes |= vote != 0;
    tk_emu_syncthreads();
    return block->verdict;  // the next barrier needs this thread, so nobody has changed it
}

TK_EXPORT void tk_emu_cluster_barrier() {
    Fiber* fiber = current;
    idle_polls = 0;
    u32 cluster = request->cluster_blocks;
    Block* first = fiber->block - fiber->block->index % cluster;
    fiber->wait = WAIT_CLUSTER;
    u32 waiting = 0;
    fiber->block->cluster_waiting++;
    for (u32 i = 0; i < cluster; i++) waiting += first[i].cluster_waiting;
    if (waiting == cluster * request->threads_per_block) {
        for (u32 i = 0; i < cluster; i++) release_block(&first[i], WAIT_CLUSTER);
        for (u32 i = 0; i < cluster; i++)
            for (u32 j = 0; j < cluster; j++) first[i].cluster_published[j] = first[j].generation;
    }
    run_next();
}

static void fiber_finish(Fiber* fiber) {
    idle_polls = 0;
    fiber->async.release();
    fiber->products.release();
    Warp* warp = fiber->warp;
    warp->exited |= 1u << fiber->lane;
    for (u32 lanes = warp->waiting; lanes; lanes &= lanes - 1) {
        Fiber* other = warp->lanes[__builtin_ctz(lanes)];
        if (other->wait_mask & (1u << fiber->lane)) fatal_at(KIND_DIVERGENT_WARP, other, fiber->lane);
    }
    fiber->block->exited++;
    live_fibers--;
    check_block_barrier(fiber->block);
}

static void fiber_main() {
    request->entry(request->params);
    fiber_finish(current);
    run_next();
    __builtin_unreachable();
}

TK_EXPORT void tk_emu_task(u32 stage, u32 task) {
    current->stage = u16(stage);
    current->task = u16(task);
    current->context = 0;
}

// A lone thread's epoch moves on, so that what it did before can be told from what it does after.
static void bump_epoch(Fiber* fiber) {
    fiber->epoch++;
    fiber->context = 0;
}

TK_EXPORT void tk_emu_grid_arrive() {
    Fiber* fiber = current;
    Block* block = fiber->block;
    bump_epoch(fiber);
    block->published.push(block->generation);
    block->arriver = fiber;
    block->arriver_epoch = fiber->epoch;
    block->acquired = false;
    u32 arrival = block->grid_arrivals++;
    if (arrival == blocks_arrived.size) blocks_arrived.push(0);
    blocks_arrived[arrival]++;
}

// The barrier was honest if every block has arrived, and if this thread could know: it polled
// itself, or met the polling thread at a block barrier since.
TK_EXPORT void tk_emu_grid_done() {
    Fiber* fiber = current;
    Block* block = fiber->block;
    u32 barrier = fiber->grid_seen++;
    fiber->context = 0;
    if (request->num_blocks == 1) return;
    u32 arrived = barrier < blocks_arrived.size ? blocks_arrived[barrier] : 0;
    if (arrived != request->num_blocks) fatal_at(KIND_DISHONEST_BARRIER, fiber, arrived);
    if (!block->acquired || (fiber != block->arriver && block->generation == block->acquire_generation))
        fatal_at(KIND_DISHONEST_BARRIER, fiber, arrived);
}

static void check_atomic(const void* address, bool is_write) {
    if (!race_checks) return;
    uptr at = reinterpret_cast<uptr>(address);
    u32 index = find_region(at);
    if (at % 4) fatal_access(KIND_MISALIGNED, current, at, 4, is_write, index);
    bool shared = at - reinterpret_cast<uptr>(current->block->shared) < request->shared_bytes;
    if (index == REGION_NONE && !shared) fatal_access(KIND_OUT_OF_BOUNDS, current, at, 4, is_write, index);
}

TK_EXPORT u32 tk_emu_atomic_add(u32* address, u32 value) {
    check_atomic(address, true);
    idle_polls = 0;
    u32 old = *address;
    *address = old + value;
    return old;
}

TK_EXPORT u32 tk_emu_atomic_exchange(u32* address, u32 value) {
    check_atomic(address, true);
    idle_polls = 0;
    u32 old = *address;
    *address = value;
    return old;
}

// The first look at a counter by which a block's arriving thread can know that all have arrived.
static void note_acquire(Fiber* fiber) {
    Block* block = fiber->block;
    if (fiber != block->arriver || block->acquired) return;
    if (blocks_arrived[block->grid_arrivals - 1] != request->num_blocks) return;
    block->acquired = true;
    block->acquire_generation = block->generation;
}

// Lets all others run first. When nothing but polls has happened for long, nobody is left to change what they wait for.
static void poll() {
    Fiber* fiber = current;
    fiber->wait = WAIT_POLL;
    make_ready(fiber);
    run_next();
    u64 round = ready_count + 1;
    if (++idle_polls % round == 0) virtual_time_ns += 1000000;
    if (idle_polls > request->idle_rounds * round) fatal(deadlock_report());
    fiber->wait = WAIT_NONE;
}

TK_EXPORT u32 tk_emu_load_acquire(const u32* address) {
    check_atomic(address, false);
    poll();
    note_acquire(current);
    return *const_cast<const volatile u32*>(address);
}

// Virtual: one microsecond per look, one millisecond per round of fruitless polls.
TK_EXPORT u64 tk_emu_globaltimer_ns() { return virtual_time_ns += 1000; }

TK_EXPORT u32 tk_emu_thread_index() { return current->thread; }
TK_EXPORT u32 tk_emu_block_index() { return current->block->index; }
TK_EXPORT u32 tk_emu_threads_per_block() { return request->threads_per_block; }
TK_EXPORT u32 tk_emu_num_blocks() { return request->num_blocks; }
TK_EXPORT void* tk_emu_dynamic_shared() { return current->block->shared; }
TK_EXPORT u32 tk_emu_cluster_rank() { return current->block->index % request->cluster_blocks; }
TK_EXPORT u32 tk_emu_cluster_size() { return request->cluster_blocks; }

TK_EXPORT void* tk_emu_cluster_map(void* shared, u32 rank) {
    Block* block = current->block;
    uptr at = reinterpret_cast<uptr>(shared);
    u64 offset = at - reinterpret_cast<uptr>(block->shared);
    if (rank >= request->cluster_blocks || offset >= request->shared_bytes)
        fatal_access(KIND_OUT_OF_BOUNDS, current, at, 1, false, REGION_NONE);
    return blocks[block->index - block->index % request->cluster_blocks + rank].shared + offset;
}
