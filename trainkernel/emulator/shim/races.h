// The race detector: happens-before over barriers, per byte.
//
// Every byte of a region and of shared memory has a Cell: the id of its last writer and of its
// readers since. An id names a Context: which thread, in which task, between which barriers. All
// barriers except __syncwarp have all threads of their scope as members, so a block needs one
// generation, not a vector clock: access A of a block is ordered before a later moment of
//   - the same thread, always;
//   - the same block, if the block's generation has moved on since A;
//   - the same warp, if a __syncwarp chain leads from A's lane to the other (seen[lane] > epoch);
//   - the same cluster, if A's block had moved on when the cluster barrier last completed;
//   - any block, if A's block had moved on when it arrived at the latest grid barrier that the
//     other thread has passed.
// Shuffles and mma order no memory, as on the device.
//
// Readers that are not ordered among each other form an interned Set with at most one entry per
// block; within a block and generation it keeps the lanes of one warp, or "several warps", which
// loses nothing: threads of two warps in one generation are never ordered.
#pragma once

#include <sys/mman.h>

struct Cell {
    u32 writer;  // 0: state before the launch, 1: cp.async in flight, else a context
    u32 readers; // 0: none since the last write, else a context or SET_BIT | set
};

static const u32 WRITER_ASYNC = 1;
static const u32 SET_BIT = 0x80000000u;
static const u32 SEVERAL_WARPS = 0xffffffffu;

struct Context {
    u32 fiber;
    u32 generation;
    u32 epoch;
    u16 task;
    u16 stage;
};

struct Readers {
    u32 block;
    u32 generation;
    u32 warp;      // within the block, or SEVERAL_WARPS
    u32 lanes;
    u32 epoch;     // the latest among the lanes
    u32 examples[2];  // contexts of two different threads (0: only one)
};

struct Set {
    u64 first;  // index into set_entries
    u32 count;
    u32 next;   // next set of the same hash bucket
    u32 hash;
};

static Array<Context> contexts;
static Array<Readers> set_entries;
static Array<Set> sets;
static const u32 SET_BUCKETS = 1 << 16;
static u32 set_buckets[SET_BUCKETS];
static const u32 MEMO = 1 << 15;
struct Memo {
    u32 readers;
    u32 context;
    u32 result;
};
static Memo join_memo[MEMO];
static Memo order_memo[MEMO];

static Cell** region_shadow = nullptr;
static const u32 REGION_CACHE = 256;
static u32 region_cache[REGION_CACHE];
// Pages of the program's object; every system's are at least this large.
static const u32 PAGE_BITS = 12, PAGE_CACHE = 64;
static uptr program_pages[PAGE_CACHE];
static u8* task_touched = nullptr;  // [block][task]
static bool race_checks = false;

static u32 mix(u32 a, u32 b) {
    u64 x = (u64(a) << 32 | b) * 0x9e3779b97f4a7c15ull;
    return u32(x >> 32) ^ u32(x >> 52);
}

static u32 published_generation(const Block* block, u32 grid_seen) {
    if (!grid_seen) return 0;
    u64 index = grid_seen <= block->published.size ? grid_seen - 1 : block->published.size - 1;
    return block->published.size ? block->published.data[index] : 0;
}

static u32 acquired_generation(const Fiber* reader, const Block* block) {
    u32 generation = published_generation(block, reader->grid_seen);
    u32 cluster = request->cluster_blocks;
    if (cluster > 1 && block->index / cluster == reader->block->index / cluster) {
        u32 through_cluster = reader->block->cluster_published[block->index % cluster];
        if (through_cluster > generation) generation = through_cluster;
    }
    return generation;
}

// Whether the access `before` happens before the present moment of `fiber`.
static bool is_ordered(const Context& before, const Fiber* fiber) {
    if (before.fiber == fiber->index) return true;
    const Fiber* other = &fibers[before.fiber];
    if (other->block == fiber->block) {
        if (before.generation < fiber->block->generation) return true;
        return other->warp == fiber->warp && fiber->seen[other->lane] > before.epoch;
    }
    u32 generation = acquired_generation(fiber, other->block);
    if (before.generation < generation) return true;
    // What the arriving thread did itself just before it arrived is published by program order.
    const Block* block = other->block;
    return before.generation == generation && other == block->arriver && block->published.size == fiber->grid_seen &&
           fiber->grid_seen && before.epoch < block->arriver_epoch;
}

static bool is_ordered(const Readers& before, const Fiber* fiber) {
    const Block* block = &blocks[before.block];
    if (block != fiber->block) return before.generation < acquired_generation(fiber, block);
    if (before.generation < block->generation) return true;
    if (before.warp != fiber->thread / 32) return false;
    for (u32 lanes = before.lanes & ~(1u << fiber->lane); lanes; lanes &= lanes - 1)
        if (fiber->seen[__builtin_ctz(lanes)] <= before.epoch) return false;
    return true;
}

__attribute__((noinline)) static u32 new_context(Fiber* fiber) {
    u32 generation = fiber->block->generation;
    Context context = {fiber->index, generation, fiber->epoch, fiber->task, fiber->stage};
    fiber->context = u32(contexts.size);
    fiber->context_generation = generation;
    contexts.push(context);
    if (fiber->task < request->num_tasks) task_touched[u64(fiber->block->index) * request->num_tasks + fiber->task] = 1;
    return fiber->context;
}

static inline u32 context_of(Fiber* fiber) {
    if (fiber->context && fiber->context_generation == fiber->block->generation) return fiber->context;
    return new_context(fiber);
}

static Readers readers_of(u32 context) {
    const Context& c = contexts[context];
    const Fiber& fiber = fibers[c.fiber];
    Readers entry = {fiber.block->index, c.generation, fiber.thread / 32, 1u << fiber.lane, c.epoch, {context, 0}};
    return entry;
}

static u32 intern(const Readers* entries, u32 count) {
    if (count == 1 && !entries[0].examples[1]) return entries[0].examples[0];
    u32 hash = count;
    for (u32 i = 0; i < count; i++) {
        const Readers& e = entries[i];
        hash = mix(hash ^ e.block, e.generation) ^ mix(e.warp ^ e.lanes, e.epoch) ^ mix(e.examples[0], e.examples[1]);
    }
    u32* bucket = &set_buckets[hash % SET_BUCKETS];
    for (u32 s = *bucket; s; s = sets[s].next) {
        if (sets[s].hash == hash && sets[s].count == count && !memcmp(&set_entries[sets[s].first], entries, count * sizeof(Readers)))
            return SET_BIT | s;
    }
    Set set = {set_entries.size, count, *bucket, hash};
    for (u32 i = 0; i < count; i++) set_entries.push(entries[i]);
    sets.push(set);
    *bucket = u32(sets.size - 1);
    return SET_BIT | *bucket;
}

// `entry` and the new reader are of one block; the result covers both.
static Readers merge(Readers entry, const Readers& reader, const Fiber* fiber) {
    if (is_ordered(entry, fiber)) return reader;
    if (entry.warp == reader.warp) {
        entry.lanes |= reader.lanes;
        if (reader.epoch > entry.epoch) entry.epoch = reader.epoch;
    } else {
        entry.warp = SEVERAL_WARPS;
        entry.lanes = 0xffffffffu;
        entry.epoch = 0;
    }
    if (!entry.examples[1] && contexts[entry.examples[0]].fiber != fiber->index) entry.examples[1] = reader.examples[0];
    return entry;
}

static u32 join_uncached(u32 known, u32 context, const Fiber* fiber) {
    Readers reader = readers_of(context);
    Readers single;
    const Readers* entries = &single;
    u32 count = 1;
    if (known & SET_BIT) {
        entries = &set_entries[sets[known & ~SET_BIT].first];
        count = sets[known & ~SET_BIT].count;
    } else {
        single = readers_of(known);
    }
    Readers* joined = static_cast<Readers*>(malloc((count + 1) * sizeof(Readers)));
    if (!joined) abort();
    u32 kept = 0;
    bool placed = false;
    for (u32 i = 0; i < count; i++) {
        if (entries[i].block == reader.block) {
            joined[kept++] = merge(entries[i], reader, fiber);
            placed = true;
        } else if (!is_ordered(entries[i], fiber)) {
            joined[kept++] = entries[i];
        }
    }
    if (!placed) joined[kept++] = reader;
    u32 result = intern(joined, kept);
    free(joined);
    return result;
}

// The readers `known` and then `fiber`. Memoised: the answer depends on the context alone, since
// whatever orders anything before the fiber starts a new context.
static u32 join_readers(u32 known, u32 context, const Fiber* fiber) {
    if (!(known & SET_BIT) && is_ordered(contexts[known], fiber)) return context;
    Memo* memo = &join_memo[mix(known, context) % MEMO];
    if (memo->readers != known || memo->context != context) {
        memo->result = join_uncached(known, context, fiber);
        memo->readers = known;
        memo->context = context;
    }
    return memo->result;
}

// A reader that is not ordered before `fiber`, or 0.
static u32 unordered_reader(u32 known, u32 context, const Fiber* fiber) {
    if (!(known & SET_BIT)) return is_ordered(contexts[known], fiber) ? 0 : known;
    Memo* memo = &order_memo[mix(known, context) % MEMO];
    if (memo->readers == known && memo->context == context) return memo->result;
    const Set set = sets[known & ~SET_BIT];
    u32 found = 0;
    for (u32 i = 0; i < set.count && !found; i++) {
        const Readers& entry = set_entries[set.first + i];
        if (is_ordered(entry, fiber)) continue;
        bool own = contexts[entry.examples[0]].fiber == fiber->index;
        found = own && entry.examples[1] ? entry.examples[1] : entry.examples[0];
    }
    *memo = {known, context, found};
    return found;
}

struct Place {
    Cell* cells;
    u32 region;
    bool initialised;
    u64 offset;
};

// Whether a launch before this one wrote a byte.
static bool was_written(const Place& place, u32 byte) {
    const u8* written = place.region < request->num_regions ? request->regions[place.region].written : nullptr;
    return written && written[place.offset + byte];
}

static Access access_of_context(u32 id, bool is_write) {
    const Context& context = contexts[id];
    const Fiber& fiber = fibers[context.fiber];
    Access access = {fiber.block->index, fiber.thread, context.task, context.stage, is_write ? 1u : 0u, 0};
    return access;
}

__attribute__((noinline)) static void report_byte(Kind kind, Fiber* fiber, const Place& place, u32 byte, u32 size,
                                                  bool is_write, u32 other, bool other_is_write) {
    Report report = {};
    report.kind = kind;
    report.region = place.region;
    report.offset = place.offset + byte;
    report.count = 1;
    report.size = size;
    report.first = access_of(fiber, is_write);
    report.second = report.first;
    if (kind == KIND_RACE) {
        report.first = access_of_context(other, other_is_write);
        request->races++;
    }
    add_report(report);
}

// Check a read of a byte in state `cell`; returns its readers from now on.
static inline u32 read_cell(Fiber* fiber, const Place& place, Cell cell, u32 context, u32 byte, u32 size) {
    if (cell.writer == 0) {
        if (!place.initialised && !was_written(place, byte))
            report_byte(KIND_UNINITIALISED, fiber, place, byte, size, false, 0, false);
    } else if (cell.writer == WRITER_ASYNC) {
        report_byte(KIND_ASYNC_PENDING, fiber, place, byte, size, false, 0, false);
    } else if (!is_ordered(contexts[cell.writer], fiber)) {
        report_byte(KIND_RACE, fiber, place, byte, size, false, cell.writer, true);
    }
    return cell.readers ? join_readers(cell.readers, context, fiber) : context;
}

// Check a write to a byte in state `cell`.
static inline void write_cell(Fiber* fiber, const Place& place, Cell cell, u32 context, u32 byte, u32 size) {
    if (cell.writer == WRITER_ASYNC) {
        report_byte(KIND_ASYNC_PENDING, fiber, place, byte, size, true, 0, false);
    } else if (cell.writer && !is_ordered(contexts[cell.writer], fiber)) {
        report_byte(KIND_RACE, fiber, place, byte, size, true, cell.writer, true);
        return;
    }
    if (!cell.readers || cell.readers == context) return;
    u32 other = unordered_reader(cell.readers, context, fiber);
    if (other) report_byte(KIND_RACE, fiber, place, byte, size, true, other, false);
}

static inline bool is_same(Cell a, Cell b) { return a.writer == b.writer && a.readers == b.readers; }

// Whether all cells are in one state; unrolled where `size` is a constant.
static inline __attribute__((always_inline)) bool is_uniform(const Cell* cells, u32 size) {
    u64 first, difference = 0;
    memcpy(&first, cells, 8);
    for (u32 i = 1; i < size; i++) {
        u64 other;
        memcpy(&other, cells + i, 8);
        difference |= first ^ other;
    }
    return !difference;
}

// Neighbouring bytes mostly have one history: bytes in the same state as the one before share its check.
static void read_mixed_cells(Fiber* fiber, const Place& place, u32 size) {
    u32 context = context_of(fiber);
    Cell* cells = place.cells;
    for (u32 i = 0; i < size;) {
        Cell cell = cells[i];
        u32 end = i + 1;
        while (end < size && is_same(cells[end], cell)) end++;
        if (cell.readers != context) {
            u32 readers = read_cell(fiber, place, cell, context, i, size);
            for (u32 j = i; j < end; j++) cells[j].readers = readers;
        }
        i = end;
    }
}

static void write_mixed_cells(Fiber* fiber, const Place& place, u32 size, u32 writer) {
    u32 context = context_of(fiber);
    Cell* cells = place.cells;
    Cell after = {writer ? writer : context, 0};
    for (u32 i = 0; i < size;) {
        Cell cell = cells[i];
        u32 end = i + 1;
        while (end < size && is_same(cells[end], cell)) end++;
        if (!is_same(cell, after)) {
            write_cell(fiber, place, cell, context, i, size);
            for (u32 j = i; j < end; j++) cells[j] = after;
        }
        i = end;
    }
}

static inline __attribute__((always_inline)) void read_cells(Fiber* fiber, const Place& place, u32 size) {
    if (!is_uniform(place.cells, size)) return read_mixed_cells(fiber, place, size);
    u32 context = context_of(fiber);
    Cell cell = place.cells[0];
    if (cell.readers == context) return;
    u32 readers = read_cell(fiber, place, cell, context, 0, size);
    for (u32 i = 0; i < size; i++) place.cells[i] = {cell.writer, readers};
}

static inline __attribute__((always_inline)) void write_cells(Fiber* fiber, const Place& place, u32 size, u32 writer) {
    if (!is_uniform(place.cells, size)) return write_mixed_cells(fiber, place, size, writer);
    u32 context = context_of(fiber);
    Cell cell = place.cells[0];
    Cell after = {writer ? writer : context, 0};
    if (is_same(cell, after)) return;
    write_cell(fiber, place, cell, context, 0, size);
    for (u32 i = 0; i < size; i++) place.cells[i] = after;
}
