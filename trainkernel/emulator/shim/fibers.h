// Fibers: one per CUDA thread. A switch saves the callee-saved registers and the stack pointer,
// nothing else, and makes no system call. Stacks come from a pool that lives as long as the
// process and is reused by every launch.
#pragma once

#include <sys/mman.h>

#define TK_TEXT2(x) #x
#define TK_TEXT(x) TK_TEXT2(x)
#define TK_SYMBOL(name) TK_TEXT(__USER_LABEL_PREFIX__) #name

extern "C" void tk_emu_switch(void** save_stack_pointer, void* load_stack_pointer);
extern "C" void tk_emu_fiber_start();

#if defined(__x86_64__)
__asm__(
    ".text\n"
    ".globl " TK_SYMBOL(tk_emu_switch) "\n"
    TK_SYMBOL(tk_emu_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    // The first switch to a fiber returns here, with the stack 16-byte aligned as at a call.
    ".globl " TK_SYMBOL(tk_emu_fiber_start) "\n"
    TK_SYMBOL(tk_emu_fiber_start) ":\n"
    "  call *%rbx\n"
    "  ud2\n");
static const int SAVED_WORDS = 7;
static const int START_WORD = 6;     // the return address
static const int FUNCTION_WORD = 4;  // rbx
#elif defined(__aarch64__)
__asm__(
    ".text\n"
    ".globl " TK_SYMBOL(tk_emu_switch) "\n"
    ".p2align 2\n"
    TK_SYMBOL(tk_emu_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".globl " TK_SYMBOL(tk_emu_fiber_start) "\n"
    ".p2align 2\n"
    TK_SYMBOL(tk_emu_fiber_start) ":\n"
    "  blr x19\n"
    "  brk #1\n");
static const int SAVED_WORDS = 20;
static const int START_WORD = 11;    // x30
static const int FUNCTION_WORD = 0;  // x19
#else
#error "the emulator's fibers know x86-64 and aarch64 only"
#endif

static const u64 STACK_BYTES = 64 * 1024;
static const u64 STACKS_PER_CHUNK = 256;
// Below the stacks of a chunk nothing can be written: one that overflows must not reach the host's own memory.
static const u64 GUARD_BYTES = 256 * 1024;
static const u64 CHUNK_BYTES = GUARD_BYTES + STACKS_PER_CHUNK * STACK_BYTES;
static const u32 MAX_CHUNKS = 4096;
static const u64 STACK_CANARY = 0x7472616b65726e65ull;

static u8* stack_chunks[MAX_CHUNKS];
static u32 num_stack_chunks = 0;

// The lowest address of stack `index`; null when the host has no memory left.
static u8* stack_at(u64 index) {
    u64 chunk = index / STACKS_PER_CHUNK;
    while (num_stack_chunks <= chunk) {
        if (num_stack_chunks == MAX_CHUNKS) return nullptr;
        void* memory = mmap(nullptr, CHUNK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        if (mprotect(memory, GUARD_BYTES, PROT_NONE)) {
            munmap(memory, CHUNK_BYTES);
            return nullptr;
        }
        stack_chunks[num_stack_chunks++] = static_cast<u8*>(memory);
    }
    return stack_chunks[chunk] + GUARD_BYTES + (index % STACKS_PER_CHUNK) * STACK_BYTES;
}

// Whether an address lies below the stacks of a chunk.
static bool is_in_guard(uptr address) {
    for (u32 i = 0; i < num_stack_chunks; i++)
        if (address - reinterpret_cast<uptr>(stack_chunks[i]) < GUARD_BYTES) return true;
    return false;
}

// Prepare a stack whose first switch calls `function`; returns the stack pointer to load.
static void* stack_prepare(u8* stack, u64 index, void (*function)()) {
    *reinterpret_cast<u64*>(stack) = STACK_CANARY;
    // Tops at different distances from 4 KiB boundaries: else all stacks share few cache sets.
    uptr top = (reinterpret_cast<uptr>(stack) + STACK_BYTES - 64 - (index % 32) * 128) & ~uptr(15);
    u64* words = reinterpret_cast<u64*>(top) - SAVED_WORDS;
    for (int i = 0; i < SAVED_WORDS; i++) words[i] = 0;
    words[START_WORD] = reinterpret_cast<uptr>(&tk_emu_fiber_start);
    words[FUNCTION_WORD] = reinterpret_cast<uptr>(function);
    return words;
}

// Large grids leave many touched stacks behind: give all but the first chunks back.
static void stacks_trim() {
    const u32 keep = 8;
    while (num_stack_chunks > keep) munmap(stack_chunks[--num_stack_chunks], CHUNK_BYTES);
}
