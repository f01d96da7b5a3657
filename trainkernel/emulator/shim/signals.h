// A thread that touches an address the host does not have ends the launch with a report, not the
// process. Without race checks this is all that stands between a stray pointer and Python.
#pragma once

#include <signal.h>

static __thread bool launching = false;
static struct sigaction saved_actions[2];
static const int FAULT_SIGNALS[2] = {SIGSEGV, SIGBUS};
alignas(16) static u8 signal_stack[64 * 1024];

static void on_fault(int number, siginfo_t* info, void*) {
    if (launching && current) {
        Report report = {};
        report.address = reinterpret_cast<uptr>(info->si_addr);
        report.kind = is_in_guard(report.address) ? KIND_STACK_OVERFLOW : KIND_SEGMENTATION;
        report.region = REGION_NONE;
        report.first = access_of(current, false);
        fatal(report);  // leaves this handler for the launching stack; SA_NODEFER kept the signal open
    }
    // Not ours: whoever handled it before sees it, when the instruction runs again.
    sigaction(number, &saved_actions[number == FAULT_SIGNALS[1]], nullptr);
}

static stack_t catch_faults() {
    stack_t stack = {}, before = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &before);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 2; i++) sigaction(FAULT_SIGNALS[i], &action, &saved_actions[i]);
    launching = true;
    return before;
}

static void release_faults(const stack_t& before) {
    launching = false;
    for (int i = 0; i < 2; i++) sigaction(FAULT_SIGNALS[i], &saved_actions[i], nullptr);
    sigaltstack(&before, nullptr);
}
