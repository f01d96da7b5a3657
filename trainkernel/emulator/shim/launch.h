// One launch: memory, order of threads, run, counters.
#pragma once

static const u64 REDZONE_BYTES = 256;
static const u64 SHARED_ALIGNMENT = 1024;
static const u8 REDZONE = 0xa5;

static Fiber* fiber_pool = nullptr;
static u64 fiber_pool_size = 0;

static void* zeroed(u64 bytes) {
    void* memory = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

static void drop(void* memory, u64 bytes) {
    if (memory) munmap(memory, bytes ? bytes : 1);
}

static void shuffle_order(u32* order, u32 count) {
    for (u32 i = 0; i < count; i++) order[i] = request->order == 1 ? count - 1 - i : i;
    if (request->order != 2) return;
    for (u32 i = count; i > 1; i--) {
        u32 j = next_random(i);
        u32 swapped = order[i - 1];
        order[i - 1] = order[j];
        order[j] = swapped;
    }
}

static bool prepare_shadow() {
    race_checks = request->check_races != 0;
    if (!race_checks) return true;
    contexts.push(Context{});  // ids 0 and 1 have meanings of their own
    contexts.push(Context{});
    sets.push(Set{});
    memset(set_buckets, 0, sizeof set_buckets);
    memset(join_memo, 0, sizeof join_memo);
    memset(order_memo, 0, sizeof order_memo);
    memset(region_cache, 0xff, sizeof region_cache);
    memset(program_pages, 0xff, sizeof program_pages);
    region_shadow = static_cast<Cell**>(calloc(request->num_regions + 1, sizeof(Cell*)));
    task_touched = static_cast<u8*>(calloc(u64(request->num_blocks) * request->num_tasks + 1, 1));
    if (!region_shadow || !task_touched) return false;
    for (u32 i = 0; i < request->num_regions; i++) {
        region_shadow[i] = static_cast<Cell*>(zeroed(request->regions[i].size * sizeof(Cell)));
        if (!region_shadow[i]) return false;
    }
    return true;
}

static bool prepare_fibers() {
    u32 threads = request->threads_per_block;
    num_fibers = request->num_blocks * threads;
    warps_per_block = (threads + 31) / 32;
    if (fiber_pool_size < num_fibers) {
        Fiber* grown = static_cast<Fiber*>(realloc(fiber_pool, num_fibers * sizeof(Fiber)));
        if (!grown) return false;
        fiber_pool = grown;
        fiber_pool_size = num_fibers;
    }
    fibers = fiber_pool;
    memset(static_cast<void*>(fibers), 0, num_fibers * sizeof(Fiber));
    u64 num_warps = u64(request->num_blocks) * warps_per_block;
    blocks = static_cast<Block*>(calloc(request->num_blocks, sizeof(Block)));
    warps = static_cast<Warp*>(calloc(num_warps, sizeof(Warp)));
    ready = static_cast<Fiber**>(calloc(num_fibers, sizeof(Fiber*)));
    shared_stride = (request->shared_bytes + REDZONE_BYTES + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
    shared_base = static_cast<u8*>(zeroed(shared_stride * request->num_blocks));
    if (!blocks || !warps || !ready || !shared_base) return false;
    for (u32 b = 0; b < request->num_blocks; b++) {
        Block* block = &blocks[b];
        block->index = b;
        block->shared = shared_base + b * shared_stride;
        memset(block->shared, 0xff, request->shared_bytes);
        memset(block->shared + request->shared_bytes, REDZONE, shared_stride - request->shared_bytes);
        if (race_checks) block->shared_shadow = static_cast<Cell*>(zeroed(request->shared_bytes * sizeof(Cell)));
        block->order = static_cast<Fiber**>(calloc(threads, sizeof(Fiber*)));
        block->cluster_published = static_cast<u32*>(calloc(request->cluster_blocks, sizeof(u32)));
        if (!block->order || !block->cluster_published || (race_checks && !block->shared_shadow)) return false;
        for (u32 t = 0; t < threads; t++) {
            Fiber* fiber = &fibers[u64(b) * threads + t];
            fiber->index = b * threads + t;
            fiber->thread = t;
            fiber->lane = t % 32;
            fiber->block = block;
            fiber->warp = &warps[u64(b) * warps_per_block + t / 32];
            fiber->warp->lanes[fiber->lane] = fiber;
            fiber->warp->present |= 1u << fiber->lane;
            fiber->task = fiber->stage = NO_TASK;
            u8* stack = stack_at(fiber->index);
            if (!stack) return false;
            fiber->stack_low = reinterpret_cast<uptr>(stack);
            fiber->stack_pointer = stack_prepare(stack, fiber->index, &fiber_main);
        }
    }
    return true;
}

static bool queue_fibers() {
    u32 threads = request->threads_per_block;
    u32 most = threads > request->num_blocks ? threads : request->num_blocks;
    u32* order = static_cast<u32*>(malloc(2 * most * sizeof(u32)));
    if (!order) return false;
    shuffle_order(order, request->num_blocks);
    for (u32 i = 0; i < request->num_blocks; i++) {
        Block* block = &blocks[order[i]];
        shuffle_order(order + most, threads);
        for (u32 t = 0; t < threads; t++) {
            block->order[t] = &fibers[u64(block->index) * threads + order[most + t]];
            make_ready(block->order[t]);
        }
    }
    free(order);
    return true;
}

static void run_fibers() {
    live_fibers = num_fibers;
    current = ready[ready_head];
    if (++ready_head == num_fibers) ready_head = 0;
    ready_count--;
    tk_emu_switch(&main_stack_pointer, current->stack_pointer);
    current = nullptr;
}

static void check_outputs_written() {
    for (u32 i = 0; i < request->num_regions; i++) {
        const Region& region = request->regions[i];
        if (!(region.flags & REGION_OUTPUT)) continue;
        Report report = {};
        report.kind = KIND_UNWRITTEN;
        report.region = i;
        report.size = 1;
        report.first.task = report.second.task = NO_TASK;
        for (u64 j = region.size; j-- > 0;) {
            if (region_shadow[i][j].writer || (region.written && region.written[j])) continue;
            report.offset = j;
            report.count++;
        }
        if (report.count) add_report(report);
    }
}

// A copy on its way when a block leaves would arrive in memory that may be another's.
static void check_bulk_awaited() {
    for (u32 b = 0; b < request->num_blocks; b++) {
        for (u64 i = 0; i < blocks[b].bulk.size; i++) {
            const BulkCopy& copy = blocks[b].bulk[i];
            Report report = {};
            report.kind = KIND_UNAWAITED;
            report.region = REGION_SHARED;
            report.offset = copy.shared - blocks[b].shared;
            report.count = 1;
            report.size = copy.bytes;
            report.first = report.second = copy.start;
            add_report(report);
        }
    }
}

static void count_results() {
    if (!live_fibers && !barrier_failed()) check_bulk_awaited();
    request->grid_barriers_min = 0xffffffffu;
    for (u32 b = 0; b < request->num_blocks; b++) {
        u32 seen = fibers[u64(b) * request->threads_per_block].grid_seen;
        if (seen < request->grid_barriers_min) request->grid_barriers_min = seen;
        if (seen > request->grid_barriers_max) request->grid_barriers_max = seen;
        const u8* redzone = blocks[b].shared + request->shared_bytes;
        for (u64 i = 0; i < shared_stride - request->shared_bytes; i++)
            if (redzone[i] != REDZONE && !request->shared_overrun) request->shared_overrun = b + 1;
    }
    if (!race_checks) return;
    if (!live_fibers && !barrier_failed()) check_outputs_written();
    for (u32 b = 0; b < request->num_blocks; b++)
        for (u32 t = 0; t < request->num_tasks; t++)
            request->task_blocks[t] += task_touched[u64(b) * request->num_tasks + t];
    for (u32 i = 0; i < request->num_regions; i++) {
        u8* written = request->regions[i].written;
        for (u64 j = 0; written && j < request->regions[i].size; j++) written[j] |= region_shadow[i][j].writer != 0;
        if (!(request->regions[i].flags & REGION_ARENA)) continue;
        for (u64 j = 0; j < request->regions[i].size; j++)
            request->arena_touched_bytes += region_shadow[i][j].writer || region_shadow[i][j].readers;
    }
}

static void release_launch() {
    for (u32 i = 0; i < num_fibers && fibers; i++) {
        fibers[i].async.release();
        fibers[i].products.release();
    }
    for (u32 b = 0; blocks && b < request->num_blocks; b++) {
        if (blocks[b].shared_shadow) drop(blocks[b].shared_shadow, request->shared_bytes * sizeof(Cell));
        free(blocks[b].order);
        free(blocks[b].cluster_published);
        blocks[b].published.release();
        blocks[b].arrivals.release();
        blocks[b].bulk.release();
    }
    for (u32 i = 0; region_shadow && i < request->num_regions; i++)
        drop(region_shadow[i], request->regions[i].size * sizeof(Cell));
    free(region_shadow);
    free(task_touched);
    free(blocks);
    free(warps);
    free(ready);
    drop(shared_base, shared_stride * request->num_blocks);
    region_shadow = nullptr;
    task_touched = nullptr;
    blocks = nullptr;
    warps = nullptr;
    ready = nullptr;
    shared_base = nullptr;
    fibers = nullptr;
    contexts.release();
    sets.release();
    set_entries.release();
    blocks_arrived.release();
    stacks_trim();
}

static void out_of_memory() {
    Report* report = &request->reports[0];
    request->num_reports = 1;
    *report = {};
    report->kind = KIND_MEMORY;
    report->region = REGION_NONE;
}

TK_EXPORT u32 tk_emu_request_bytes() { return sizeof(Request); }

TK_EXPORT void tk_emu_launch(Request* launch) {
    request = launch;
    virtual_time_ns = 1000000;
    idle_polls = 0;
    ready_head = ready_count = num_fibers = 0;
    random_state = launch->seed * 0x9e3779b97f4a7c15ull + 0x853c49e6748fea9bull;
    if (!random_state) random_state = 1;
    if (prepare_shadow() && prepare_fibers() && queue_fibers()) {
        stack_t before = catch_faults();
        run_fibers();
        release_faults(before);
        count_results();
    } else {
        out_of_memory();
    }
    release_launch();
    request = nullptr;
}
