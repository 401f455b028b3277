// Runs kernels/sm90/prepare.c on the host, whole grids of it (test_prepare_sm90.py). device.h is, here, the file
// host_device.h. Memory comes with pages around it that no one may touch.
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "prepare.c"

#define EXPORT __attribute__((visibility("default")))

enum { PAGE = 1 << 16 }; // a multiple of any machine's

static size_t padded(size_t bytes) { return (size_t)mx_round_up((int64_t)bytes, PAGE); }

// Memory whose end is at most 15 bytes before a page of no one's, at an address of 16 n + past.
EXPORT uint8_t *allocate(size_t bytes, size_t past) {
    const size_t size = padded(bytes + past + 16);
    uint8_t *all = mmap(nullptr, size + 2 * PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + PAGE, size, PROT_READ | PROT_WRITE))
        abort();
    return all + PAGE + size - (size_t)mx_round_up((int64_t)(bytes + past), 16) + past;
}
EXPORT void release(uint8_t *memory, size_t bytes, size_t past) {
    const size_t size = padded(bytes + past + 16);
    munmap(memory - past + (size_t)mx_round_up((int64_t)(bytes + past), 16) - size - PAGE, size + 2 * PAGE);
}

static struct mx_rows_args rows_args;
static struct mx_depth_args depth_args;
static struct mx_sm90_plan plan;
static int is_depth;

// A fiber: thread after thread, of one block after the other.
static void run_threads(void) {
    for (;;) {
        if (is_depth)
            mx_prepare_depth_sm90(depth_args, plan);
        else
            mx_prepare_rows_sm90(rows_args, plan);
        fibers[current_thread].ended = 1;
        yield();
    }
}

static void start(struct fiber *fiber, char *stack) {
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_threads, 0);
    fiber->started = 1;
    setcontext(&context);
}

static void resume(uint32_t thread) {
    static char stacks[BLOCK][STACK];
    current_thread = thread;
    fibers[thread].at = nullptr;
    if (_setjmp(scheduler))
        return;
    if (!fibers[thread].started)
        start(&fibers[thread], stacks[thread]);
    _longjmp(fibers[thread].resume, 1);
}

// Blocks take turns in going through their threads forwards and backwards, so that a missing barrier shows.
static int run_block(void) {
    block_meeting = (struct meeting){};
    memset(warp_meetings, 0, sizeof warp_meetings);
    for (int i = 0; i < BLOCK; i++)
        fibers[i].ended = 0;
    for (int left = BLOCK; left;) {
        int moved = 0;
        for (int i = 0; i < BLOCK; i++) {
            struct fiber *fiber = &fibers[current_block % 2 ? BLOCK - 1 - i : i];
            if (fiber->ended || (fiber->at && fiber->at->turn == fiber->turn))
                continue;
            resume((uint32_t)(fiber - fibers));
            moved = 1;
            left -= fiber->ended;
        }
        if (!moved)
            return fprintf(stderr, "block %u: %d threads wait for others\n", current_block, left);
    }
    return 0;
}

// In a process of its own, as it may crash. 0, or how it ended.
static int run_grid(void) {
    const pid_t child = fork();
    if (child == 0) {
        for (current_block = 0; current_block < (uint32_t)plan.prepare_blocks; current_block++)
            if (run_block())
                _exit(1);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

// Where the parts of the workspace are.
struct layout {
    int64_t p_scale, q_scale, p_ref, q_ref, bytes, tiles, steps;
};
static struct layout layout_of(void) {
    return (struct layout){plan.p_scale, plan.q_scale, plan.p_ref, plan.q_ref, plan.bytes, plan.tiles, plan.steps};
}

EXPORT struct layout plan_rows(const struct mx_rows_args *args, int swapped, int processors) {
    rows_args = *args;
    is_depth = 0;
    plan = mx_sm90_plan_rows(args, nullptr, swapped, processors);
    return layout_of();
}
EXPORT struct layout plan_depth(const struct mx_depth_args *args, int, int processors) {
    depth_args = *args;
    is_depth = 1;
    plan = mx_sm90_plan_depth(args, nullptr, processors);
    return layout_of();
}
// Of what was planned last.
EXPORT int run_planned(uint8_t *workspace) {
    plan.workspace = workspace;
    return run_grid();
}
EXPORT const int tile_bytes = sizeof(struct mx_sm90_tile);
