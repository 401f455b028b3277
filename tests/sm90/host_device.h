// Stands in for kernels/sm90/device.h, so that prepare.c runs on the host: a block's threads are fibers that take
// turns, and wait for each other in shuffles and barriers. What the GPU refuses is an error here as well.
#pragma once
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "plan.h"

#define SHARED
#define INLINE static inline
#include "words.h"

#define KERNEL(name, threads, blocks) static void name
#define UNROLL
#define ROLLED
#define HIDE(x) (void)(x)

typedef uint32_t u32x4 __attribute__((ext_vector_type(4)));
typedef int32_t i32x4 __attribute__((ext_vector_type(4)));
typedef int16_t i16x2 __attribute__((ext_vector_type(2)));

enum { BLOCK = MX_SM90_PREPARE_THREADS, WARP = 32, STACK = 1 << 16 };

// Threads that wait for each other; where all have come, the next turn begins.
struct meeting {
    uint32_t turn, come;
};
static struct fiber {
    jmp_buf resume;
    const struct meeting *at; // where it waits for the turn after `turn`, or null
    uint32_t turn;
    int started, ended;
} fibers[BLOCK];
static jmp_buf scheduler;
static struct meeting block_meeting, warp_meetings[BLOCK / WARP];
static uint32_t exchanged[2][BLOCK];
static uint32_t current_thread, current_block;

INLINE uint32_t thread_id(void) { return current_thread; }
INLINE uint32_t block_id(void) { return current_block; }

// Lets the scheduler go on. Once a fiber has begun, jumps suffice: they are no system calls, as swapcontext is.
static void yield(void) {
    if (!_setjmp(fibers[current_thread].resume))
        _longjmp(scheduler, 1);
}

static void meet(struct meeting *meeting, uint32_t size) {
    struct fiber *fiber = &fibers[current_thread];
    fiber->turn = meeting->turn;
    if (++meeting->come == size) {
        *meeting = (struct meeting){meeting->turn + 1, 0};
        return;
    }
    fiber->at = meeting;
    yield();
}

INLINE void sync_block(void) { meet(&block_meeting, BLOCK); }
INLINE void launch_dependents(void) {}

INLINE uint32_t shuffle(uint32_t x, uint32_t lane) {
    struct meeting *warp = &warp_meetings[current_thread / WARP];
    uint32_t *values = exchanged[warp->turn % 2] + current_thread / WARP * WARP;
    values[current_thread % WARP] = x;
    meet(warp, WARP);
    return values[lane % WARP];
}

INLINE const void *aligned(const void *p, uintptr_t bytes) {
    if ((uintptr_t)p % bytes)
        abort();
    return p;
}
INLINE uint32_t load_constant(const void *p) { return *(const uint32_t *)aligned(p, 4); }
INLINE uint32_t load_constant_if(int condition, const void *p) { return condition ? load_constant(p) : 0; }
INLINE u32x4 load_constant4(const void *p) { return *(const u32x4 *)aligned(p, 16); }
INLINE u32x4 load_constant4_if(int condition, const void *p) { return condition ? load_constant4(p) : (u32x4){}; }
