// Operations in which the lanes of a warp meet: __syncwarp, shuffles, ldmatrix, mma; cp.async and wgmma.
#pragma once

enum Shuffle : u32 { SHUFFLE_INDEX = 0, SHUFFLE_DOWN = 1, SHUFFLE_XOR = 2, SHUFFLE_UP = 3 };

// Wait until every lane of `mask` is here. Returns true in the lane that came last: it does the
// operation for all and then calls warp_release.
static bool warp_arrive(Fiber* fiber, Wait wait, u32 mask) {
    Warp* warp = fiber->warp;
    u32 bit = 1u << fiber->lane;
    idle_polls = 0;
    mask &= warp->present;
    fiber->wait = wait;
    fiber->wait_mask = mask;
    if (!(mask & bit)) fatal_at(KIND_DIVERGENT_WARP, fiber, fiber->lane);
    if (mask & warp->exited) fatal_at(KIND_DIVERGENT_WARP, fiber, u32(__builtin_ctz(mask & warp->exited)));
    warp->waiting |= bit;
    if ((warp->waiting & mask) != mask) {
        run_next();
        return false;
    }
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        Fiber* other = warp->lanes[__builtin_ctz(lanes)];
        if (other->wait != wait || other->wait_mask != mask) fatal_at(KIND_DIVERGENT_WARP, fiber, other->lane);
    }
    return true;
}

static void warp_release(Fiber* fiber) {
    Warp* warp = fiber->warp;
    u32 mask = fiber->wait_mask;
    warp->waiting &= ~mask;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        Fiber* other = warp->lanes[__builtin_ctz(lanes)];
        other->wait = WAIT_NONE;
        if (other != fiber) make_ready(other);
    }
}

TK_EXPORT void tk_emu_syncwarp(u32 mask) {
    Fiber* fiber = current;
    if (!warp_arrive(fiber, WAIT_SYNCWARP, mask)) return;
    u32 joined[32] = {};
    u32 epoch = 0;
    for (u32 lanes = fiber->wait_mask; lanes; lanes &= lanes - 1) {
        const Fiber* other = fiber->warp->lanes[__builtin_ctz(lanes)];
        if (other->epoch > epoch) epoch = other->epoch;
        for (int i = 0; i < 32; i++)
            if (other->seen[i] > joined[i]) joined[i] = other->seen[i];
    }
    epoch++;
    for (u32 lanes = fiber->wait_mask; lanes; lanes &= lanes - 1) joined[__builtin_ctz(lanes)] = epoch;
    for (u32 lanes = fiber->wait_mask; lanes; lanes &= lanes - 1) {
        Fiber* other = fiber->warp->lanes[__builtin_ctz(lanes)];
        memcpy(other->seen, joined, sizeof joined);
        other->epoch = epoch;
        other->context = 0;
    }
    warp_release(fiber);
}

// As __shfl_*_sync: within segments of `width` lanes; a source outside the segment is oneself; a
// source that does not take part gives poison.
static u32 shuffle_source(const Fiber* fiber, u32 kind, u32 argument, u32 width) {
    u32 lane = fiber->lane, base = lane & ~(width - 1);
    if (kind == SHUFFLE_INDEX) return base + (argument & (width - 1));
    if (kind == SHUFFLE_XOR) {
        u32 source = lane ^ argument;
        return source < base + width && source < 32 ? source : lane;
    }
    if (kind == SHUFFLE_DOWN) return lane + argument < base + width ? lane + argument : lane;
    return lane - base >= argument ? lane - argument : lane;
}

TK_EXPORT u32 tk_emu_shuffle(u32 mask, u32 value, u32 kind, u32 argument, u32 width) {
    Fiber* fiber = current;
    u32 result = 0;
    fiber->value = value;
    fiber->argument = kind | argument << 8 | width << 16;
    fiber->operands[0] = &result;
    if (warp_arrive(fiber, WAIT_SHUFFLE, mask)) {
        for (u32 lanes = fiber->wait_mask; lanes; lanes &= lanes - 1) {
            Fiber* other = fiber->warp->lanes[__builtin_ctz(lanes)];
            u32 packed = other->argument;
            u32 source = shuffle_source(other, packed & 255, packed >> 8 & 255, packed >> 16);
            bool takes_part = fiber->wait_mask >> source & 1;
            *static_cast<u32*>(other->operands[0]) = takes_part ? fiber->warp->lanes[source]->value : 0xffffffffu;
        }
        warp_release(fiber);
    }
    // The lane that did the work wrote here while this lane slept.
    return *const_cast<volatile u32*>(&result);
}

// PTX ldmatrix: lane i gives the address of row i; matrix m is rows 8m..8m+7 of 8 16-bit elements.
TK_EXPORT void tk_emu_ldmatrix(u32* registers, const void* row, u32 matrices, u32 transposed) {
    Fiber* fiber = current;
    uptr at = reinterpret_cast<uptr>(row);
    if (fiber->lane < matrices * 8) {
        if (at % 16) fatal_access(KIND_MISALIGNED, fiber, at, 16, false, find_region(at));
        access(at, 16, false);
    }
    fiber->operands[0] = registers;
    fiber->operands[1] = const_cast<void*>(row);
    if (!warp_arrive(fiber, WAIT_LDMATRIX, 0xffffffffu)) return;
    if (fiber->warp->present != 0xffffffffu) fatal_at(KIND_DIVERGENT_WARP, fiber, 31);
    Fiber** lanes = fiber->warp->lanes;
    for (u32 lane = 0; lane < 32; lane++) {
        for (u32 m = 0; m < matrices; m++) {
            u16 pair[2];
            for (u32 i = 0; i < 2; i++) {
                u32 r = transposed ? lane % 4 * 2 + i : lane / 4;
                u32 c = transposed ? lane / 4 : lane % 4 * 2 + i;
                memcpy(&pair[i], static_cast<u8*>(lanes[m * 8 + r]->operands[1]) + c * 2, 2);
            }
            static_cast<u32*>(lanes[lane]->operands[0])[m] = pair[0] | u32(pair[1]) << 16;
        }
    }
    warp_release(fiber);
}

static float half_to_float(u16 bits) {
    u32 magnitude = bits & 0x7fffu;
    float value = float(magnitude & 0x3ff) * 0x1p-24f;  // exact for denormals
    if (magnitude >= 0x400) {
        u32 wide = (magnitude << 13) + (magnitude >= 0x7c00 ? (255u - 31) << 23 : (127u - 15) << 23);
        memcpy(&value, &wide, 4);
    }
    return bits & 0x8000 ? -value : value;
}

static float element(u32 pair, u32 half, bool bfloat) {
    u32 bits = half ? pair >> 16 : pair & 0xffff;
    if (!bfloat) return half_to_float(u16(bits));
    bits <<= 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// The lanes of the warp with their fragments, for the lane that comes last; null for the others.
static Fiber** meet_with_fragments(float* d, const u32* a, const u32* b) {
    Fiber* fiber = current;
    fiber->operands[0] = d;
    fiber->operands[1] = const_cast<u32*>(a);
    fiber->operands[2] = const_cast<u32*>(b);
    if (!warp_arrive(fiber, WAIT_MMA, 0xffffffffu)) return nullptr;
    if (fiber->warp->present != 0xffffffffu) fatal_at(KIND_DIVERGENT_WARP, fiber, 31);
    return fiber->warp->lanes;
}

// The sums of a 16 x 8 tile, each rounded once, go to the lanes that hold them, which go on.
template <u32 DEPTH>
static void multiply(Fiber** lanes, const double (&left)[16][DEPTH], const double (&right)[DEPTH][8], double (&sum)[16][8]) {
    for (u32 m = 0; m < 16; m++)
        for (u32 k = 0; k < DEPTH; k++)
            for (u32 n = 0; n < 8; n++) sum[m][n] += left[m][k] * right[k][n];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4 * 2;
        float* out = static_cast<float*>(lanes[lane]->operands[0]);
        for (u32 i = 0; i < 4; i++) out[i] = float(sum[g + i / 2 * 8][t + i % 2]);
    }
    warp_release(current);
}

static float tf32(u32 bits) {
    bits &= 0xffffe000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// PTX mma.m16n8k16.row.col: products are exact, summed in float64, rounded once. The hardware's
// sum is not IEEE either; the op table bounds the difference.
TK_EXPORT void tk_emu_mma(float* d, const u32* a, const u32* b, u32 bfloat) {
    Fiber** lanes = meet_with_fragments(d, a, b);
    if (!lanes) return;
    double left[16][16], right[16][8], sum[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4 * 2;
        const float* c = static_cast<float*>(lanes[lane]->operands[0]);
        const u32* ra = static_cast<u32*>(lanes[lane]->operands[1]);
        const u32* rb = static_cast<u32*>(lanes[lane]->operands[2]);
        for (u32 i = 0; i < 2; i++) {
            for (u32 r = 0; r < 4; r++) left[g + r % 2 * 8][t + i + r / 2 * 8] = element(ra[r], i, bfloat);
            for (u32 r = 0; r < 2; r++) right[t + i + r * 8][g] = element(rb[r], i, bfloat);
            for (u32 r = 0; r < 2; r++) sum[g + r * 8][t + i] = c[r * 2 + i];
        }
    }
    multiply(lanes, left, right, sum);
}

// PTX mma.m16n8k8 of TF32 numbers, whose lower 13 bits the hardware ignores; sums as above.
TK_EXPORT void tk_emu_mma_tf32(float* d, const u32* a, const u32* b) {
    Fiber** lanes = meet_with_fragments(d, a, b);
    if (!lanes) return;
    double left[16][8], right[8][8], sum[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        u32 g = lane / 4, t = lane % 4;
        const float* c = static_cast<float*>(lanes[lane]->operands[0]);
        const u32* ra = static_cast<u32*>(lanes[lane]->operands[1]);
        const u32* rb = static_cast<u32*>(lanes[lane]->operands[2]);
        for (u32 r = 0; r < 4; r++) left[g + r % 2 * 8][t + r / 2 * 4] = tf32(ra[r]);
        for (u32 r = 0; r < 2; r++) right[t + r * 4][g] = tf32(rb[r]);
        for (u32 i = 0; i < 4; i++) sum[g + i / 2 * 8][t * 2 + i % 2] = c[i];
    }
    multiply(lanes, left, right, sum);
}

// cp.async: at issue the destination becomes poison and its shadow "in flight"; the bytes arrive
// at the wait. So a missing wait shows as poison, and as an error of its own under the detector. What is
// not inside of the operand is not read: zeros arrive.
TK_EXPORT void tk_emu_cp_async(void* shared, const void* global, u32 bytes, bool inside) {
    Fiber* fiber = current;
    uptr to = reinterpret_cast<uptr>(shared), from = reinterpret_cast<uptr>(global);
    if (to % bytes) fatal_access(KIND_MISALIGNED, fiber, to, bytes, true, REGION_SHARED);
    if (inside && from % bytes) fatal_access(KIND_MISALIGNED, fiber, from, bytes, false, find_region(from));
    if (to - reinterpret_cast<uptr>(fiber->block->shared) >= request->shared_bytes)
        fatal_access(KIND_OUT_OF_BOUNDS, fiber, to, bytes, true, REGION_SHARED);
    if (inside) access(from, bytes, false);
    access(to, bytes, true, WRITER_ASYNC);
    memset(shared, 0xff, bytes);
    AsyncCopy copy = {static_cast<u8*>(shared), inside ? static_cast<const u8*>(global) : nullptr, bytes, fiber->async_group};
    fiber->async.push(copy);
}

// The bytes of a copy that was on its way arrive, for a thread that has waited; zeros without a source.
static void land(Fiber* fiber, u8* shared, const u8* global, u32 bytes) {
    if (global)
        memcpy(shared, global, bytes);
    else
        memset(shared, 0, bytes);
    if (!race_checks) return;
    for (u32 i = 0; global && i < bytes; i += 16)
        access(reinterpret_cast<uptr>(global) + i, bytes - i < 16 ? bytes - i : 16, false);
    u32 context = context_of(fiber);
    Cell* cells = fiber->block->shared_shadow + (shared - fiber->block->shared);
    for (u32 i = 0; i < bytes; i++)
        if (cells[i].writer == WRITER_ASYNC) cells[i] = {context, 0};
}

TK_EXPORT void tk_emu_cp_async_commit() { current->async_group++; }

TK_EXPORT void tk_emu_cp_async_wait(u32 pending_groups) {
    Fiber* fiber = current;
    u64 done = 0;
    while (done < fiber->async.size && fiber->async[done].group + pending_groups < fiber->async_group) {
        AsyncCopy copy = fiber->async[done++];
        land(fiber, copy.shared, copy.global, copy.bytes);
    }
    fiber->async.size -= done;
    if (done) memmove(fiber->async.data, fiber->async.data + done, fiber->async.size * sizeof(AsyncCopy));
}

// Where element (o, k) of a wgmma's matrix lies: rows of 128 bytes whose 16-byte chunks are exchanged by the row.
static uptr matrix_place(const Matrix& matrix, u32 o, u32 k, u32 bytes) {
    u32 row = matrix.across ? k : o, column = matrix.across ? o % 64 : k;
    uptr part = matrix.across ? o / 64 * matrix.part_bytes : 0;
    uptr at = reinterpret_cast<uptr>(matrix.start) + part + row / 8 * matrix.rows_bytes + row % 8 * 128 + column * bytes;
    return at ^ (at >> 7 & 7) << 4;
}

static const u32 FORMAT_TF32 = 2;

static u32 depth_of(const AsyncProduct& product) { return product.format == FORMAT_TF32 ? 8 : 16; }
static u32 bytes_of(const AsyncProduct& product) { return product.format == FORMAT_TF32 ? 4 : 2; }

static float matrix_element(const AsyncProduct& product, const Matrix& matrix, u32 o, u32 k) {
    u32 bits = 0;
    memcpy(&bits, reinterpret_cast<void*>(matrix_place(matrix, o, k, bytes_of(product))), bytes_of(product));
    return product.format == FORMAT_TF32 ? tf32(bits) : element(bits, 0, product.format);
}

// Notes that a thread reads what it needs: its rows of a; of b, the first lane for its whole warp.
static void touch_matrices(const AsyncProduct& product, u32 warp_row) {
    Fiber* fiber = current;
    u32 bytes = bytes_of(product);
    for (u32 k = 0; k < depth_of(product); k++) {
        if (fiber->lane % 4 == 0)
            for (u32 i = 0; i < 2; i++)
                access(matrix_place(product.a, warp_row + fiber->lane / 4 + i * 8, k, bytes), bytes, false);
        if (fiber->lane == 0)
            for (u32 n = 0; n < product.columns; n++) access(matrix_place(product.b, n, k, bytes), bytes, false);
    }
}

// PTX wgmma.mma_async.m64nNkK with 128-byte swizzle: it reads shared memory between its issue and the wait, so both
// count as reads, and what it finds at the wait is multiplied. Products are exact, summed in float64, rounded once.
TK_EXPORT void tk_emu_wgmma(float* d, u32 columns, const Matrix* a, const Matrix* b, u32 format, u32 adds) {
    Fiber* fiber = current;
    AsyncProduct product = {d, *a, *b, columns, format, adds, fiber->product_group};
    touch_matrices(product, fiber->thread % 128 / 32 * 16);
    fiber->products.push(product);
}

TK_EXPORT void tk_emu_wgmma_commit() { current->product_group++; }

static void multiply_own(const AsyncProduct& product, u32 row, u32 lane) {
    u32 depth = depth_of(product);
    double left[2][16];
    for (u32 i = 0; i < 2; i++)
        for (u32 k = 0; k < depth; k++) left[i][k] = matrix_element(product, product.a, row + lane / 4 + i * 8, k);
    for (u32 at = 0; at < product.columns / 4; at++) {
        u32 n = at / 2 * 8 + lane % 4 * 2 + at % 2;
        float* own[2] = {product.d + at / 2 * 4 + at % 2, product.d + at / 2 * 4 + 2 + at % 2};
        double sums[2] = {product.adds ? *own[0] : 0.0, product.adds ? *own[1] : 0.0};
        for (u32 k = 0; k < depth; k++) {
            double right = matrix_element(product, product.b, n, k);
            for (u32 i = 0; i < 2; i++) sums[i] += left[i][k] * right;
        }
        for (u32 i = 0; i < 2; i++) *own[i] = float(sums[i]);
    }
}

TK_EXPORT void tk_emu_wgmma_wait(u32 pending_groups) {
    Fiber* fiber = current;
    u64 done = 0;
    u32 row = fiber->thread % 128 / 32 * 16;
    while (done < fiber->products.size && fiber->products[done].group + pending_groups < fiber->product_group) {
        const AsyncProduct product = fiber->products[done++];
        touch_matrices(product, row);
        multiply_own(product, row, fiber->lane);
    }
    fiber->products.size -= done;
    if (done) memmove(fiber->products.data, fiber->products.data + done, fiber->products.size * sizeof(AsyncProduct));
}
