/* One kernel launch: blocks over host threads, waves of a block interleaved by seed, one instruction at a time.
 * Start state of a wave: LLVM's AMDGPUUsage (initial kernel execution state). Everything that the hardware leaves
 * undefined (registers, LDS) starts as junk that depends on the seed. Same seed and one thread: same schedule, same
 * junk, same result. */
#include "machine.h"

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "exec.h"
#include "memory.h"

/* ---- storage of blocks, reused from block to block of a thread ---- */
static void free_wave(struct emu_wave *w) {
    if (!w)
        return;
    free(w->vm.slot);
    free(w->ds.slot);
    free(w->sm.slot);
    free(w->scratch);
    free(w);
}

static bool make_queue(struct emu_queue *q, unsigned size) {
    q->size = size;
    q->slot = malloc(size * sizeof *q->slot);
    return q->slot;
}

static struct emu_wave *make_wave(const struct emu_kernel *k) {
    struct emu_wave *w = aligned_alloc(4096, (sizeof *w + 4095) & ~(size_t)4095);
    if (!w)
        return nullptr;
    memset(w, 0, sizeof *w);
    bool ok = make_queue(&w->vm, EMU_VMCNT_MAX + 1) && make_queue(&w->ds, EMU_LGKMCNT_MAX + 1) &&
              make_queue(&w->sm, EMU_SMEM_MAX);
    if (k->private_segment)
        ok = ok && (w->scratch = malloc((size_t)EMU_LANES * k->private_segment));
    if (ok)
        return w;
    free_wave(w);
    return nullptr;
}

static void free_block(struct emu_block *b) {
    if (!b)
        return;
    for (unsigned n = 0; n < EMU_WAVES_MAX; n++)
        free_wave(b->waves[n]);
    free(b->lds);
    free(b->shadow);
    free(b->stats);
    free(b);
}

static struct emu_block *make_block(struct emu_launch *l) {
    struct emu_block *b = calloc(1, sizeof *b);
    if (!b)
        return nullptr;
    b->l = l;
    b->k = l->k;
    b->lds_bytes = l->k->group_segment + l->dyn_lds;
    unsigned threads = l->block[0] * l->block[1] * l->block[2];
    b->nwaves = (threads + EMU_LANES - 1) / EMU_LANES;
    bool ok = (b->lds = malloc(b->lds_bytes + 16)) && (b->stats = calloc(l->k->ninsts + 1, sizeof *b->stats));
    ok = ok && (!l->opt.strict || (b->shadow = calloc(b->lds_bytes + 1, sizeof *b->shadow)));
    for (unsigned n = 0; ok && n < b->nwaves; n++)
        ok = b->waves[n] = make_wave(l->k);
    if (ok)
        return b;
    free_block(b);
    return nullptr;
}

/* ---- start state ---- */
static void start_sgprs(struct emu_wave *w) {
    const struct emu_kernel *k = w->b->k;
    const struct emu_launch *l = w->b->l;
    unsigned s = 0;
    if (k->props & 8) {
        w->s[s++] = (uint32_t)(uintptr_t)l->kernarg;
        w->s[s++] = (uint32_t)((uintptr_t)l->kernarg >> 32);
    }
    for (unsigned n = 0; n < (k->preload & 127); n++)
        memcpy(&w->s[s++], l->kernarg + (size_t)4 * ((k->preload >> 7) + n), 4);
    for (unsigned d = 0; d < 3; d++)
        if (k->rsrc2 >> (7 + d) & 1)
            w->s[s++] = w->b->id[d];
}

static void start_lanes(struct emu_wave *w) {
    const uint32_t *size = w->b->l->block;
    uint32_t threads = size[0] * size[1] * size[2], level = w->b->k->rsrc2 >> 11 & 3;
    w->live = 0;
    for (unsigned l = 0; l < EMU_LANES; l++) {
        uint32_t id = w->id * EMU_LANES + l;
        if (id >= threads)
            continue;
        w->live |= 1ull << l;
        uint32_t x = id % size[0], y = id / size[0] % size[1], z = id / size[0] / size[1];
        w->v[0][l] = x | (level > 0 ? y << 10 : 0) | (level > 1 ? z << 20 : 0);
    }
    w->s[EMU_EXEC] = (uint32_t)w->live;
    w->s[EMU_EXEC + 1] = (uint32_t)(w->live >> 32);
}

static void start_wave(struct emu_block *b, unsigned id) {
    struct emu_wave *w = b->waves[id];
    w->b = b;
    w->id = (uint8_t)id;
    w->rng = emu_rand(&b->rng);
    emu_junk(w->v, b->k->env.vgprs * sizeof *w->v, emu_rand(&w->rng));
    emu_junk(w->s, sizeof w->s, emu_rand(&w->rng));
    if (w->scratch)
        emu_junk(w->scratch, (size_t)EMU_LANES * b->k->private_segment, emu_rand(&w->rng));
    memset(w->track, 0, b->k->env.vgprs * sizeof *w->track);
    memset(w->sgpr_valu, 0, sizeof w->sgpr_valu);
    memset(w->vpend, 0, sizeof w->vpend);
    memset(w->dpend, 0, sizeof w->dpend);
    memset(w->spend, 0, sizeof w->spend);
    w->vm.head = w->vm.count = w->vm.landed = w->ds.head = w->ds.count = w->ds.landed = w->sm.head = w->sm.count = 0;
    w->exec_valu = w->m0_salu = w->setreg = 0;
    w->t = 1000; /* far from the zeros above */
    w->pc = b->k->preload & 127 ? 256 : 0;
    w->ninsts = 0;
    w->state = WAVE_RUN;
    w->ovfl = b->k->rsrc1 >> 26 & 1;
    w->scc = emu_rand(&w->rng) & 1;
    w->vccz_stale = false;
    w->gpr_idx = 0;
    w->cache_lo = w->cache_hi = 0;
    uint64_t policy = emu_rand(&w->rng) % 3;
    w->land_random = b->l->opt.landing == EMU_LAND_SEED && policy == 2;
    w->land_early = b->l->opt.landing == EMU_LAND_EARLY || (b->l->opt.landing == EMU_LAND_SEED && policy == 0);
    start_sgprs(w);
    start_lanes(w);
}

static void start_block(struct emu_block *b, uint64_t linear) {
    const uint32_t *grid = b->l->grid;
    b->id[0] = (uint32_t)(linear % grid[0]);
    b->id[1] = (uint32_t)(linear / grid[0] % grid[1]);
    b->id[2] = (uint32_t)(linear / grid[0] / grid[1]);
    b->rng = b->l->opt.seed * emu_golden + linear;
    emu_rand(&b->rng);
    b->live = b->nwaves;
    b->epoch++; /* past every epoch in the LDS shadow, which the block before left with nothing in flight */
    b->lds_seed = emu_rand(&b->rng);
    b->lds_started = false;
    for (unsigned n = 0; n < b->nwaves; n++)
        start_wave(b, n);
    b->counters[CNT_BLOCKS]++;
    b->counters[CNT_WAVES] += b->nwaves;
}

/* ---- one instruction ---- */
static void count_inst(struct emu_block *b, const struct emu_inst *i) {
    static const uint8_t class_of[ENC_COUNT] = {[ENC_SOP1] = CNT_SALU,   [ENC_SOP2] = CNT_SALU,   [ENC_SOPK] = CNT_SALU,
                                                [ENC_SOPC] = CNT_SALU,   [ENC_SOPP] = CNT_BRANCH, [ENC_SMEM] = CNT_SMEM,
                                                [ENC_VOP1] = CNT_VALU,   [ENC_VOP2] = CNT_VALU,   [ENC_VOPC] = CNT_VALU,
                                                [ENC_VOP3] = CNT_VALU,   [ENC_VOP3P] = CNT_VALU,  [ENC_MFMA] = CNT_VALU,
                                                [ENC_DS] = CNT_DS,       [ENC_MUBUF] = CNT_VMEM,  [ENC_FLAT] = CNT_VMEM,
                                                [ENC_GLOBAL] = CNT_VMEM, [ENC_SCRATCH] = CNT_VMEM};
    b->counters[CNT_INSTS]++;
    b->stats[i - b->k->insts].hits++;
    enum emu_counter c = class_of[i->op->enc];
    if (emu_is_matrix(i))
        c = CNT_MFMA;
    else if (i->op->enc == ENC_SOPP)
        switch (i->op->opcode) {
        case 12:
            c = CNT_WAITCNT;
            break;
        case 10:
            c = CNT_BARRIER;
            break;
        case 0:
            b->counters[CNT_NOP_STATES] += i->simm + 1u;
            return;
        case 1:
        case 14:
        case 15:
            return;
        default:
            break;
        }
    b->counters[c]++;
}

/* of the lines of insts.def in their order */
static const union {
    emu_salu_fn *s;
    emu_lane_fn *v;
    emu_run_fn *r;
} handlers[] = {
#define S(e, o, n, p, h, a) {.s = emu_s_##h},
#define V(e, o, n, p, h, f, a) {.v = emu_v_##h},
#define R(e, o, n, p, h, f, a) {.r = emu_r_##h},
#include "insts.def"
#undef S
#undef V
#undef R
};

static bool execute(struct emu_wave *w, const struct emu_inst *i) {
    const struct emu_op *table;
    emu_op_table(&table);
    switch (i->op->kind) {
    case KIND_S:
        return emu_exec_salu(w, i, handlers[i->op - table].s);
    case KIND_V:
        return emu_exec_valu(w, i, handlers[i->op - table].v);
    default:
        return handlers[i->op - table].r(w, i);
    }
}

static bool step(struct emu_wave *w) {
    struct emu_block *b = w->b;
    const struct emu_inst *i = emu_inst_at(b->k, w->pc);
    if (!i)
        return emu_stop(w, -1, "no instruction starts here");
    if (i->fault[0])
        return emu_stop(w, -1, "%s", i->fault);
    if (b->l->opt.max_insts && w->ninsts >= b->l->opt.max_insts)
        return emu_stop(w, -1, "more than %llu instructions in one wave", (unsigned long long)b->l->opt.max_insts);
    w->next = w->pc + 4u * i->nwords;
    const struct emu_inst *exact = i;
    if (w->gpr_idx && i->op->enc >= ENC_VOP1 && i->op->enc <= ENC_MFMA) {
        if (!emu_index_registers(w, i, &w->indexed))
            return false;
        exact = &w->indexed;
    }
    if (b->l->opt.strict && !emu_check(w, exact))
        return false;
    if (!execute(w, exact) || b->error.code)
        return false;
    if (b->l->opt.strict)
        emu_track_writes(w, exact);
    count_inst(b, i);
    w->ninsts++;
    w->t += i->op->enc == ENC_SOPP && i->op->opcode == 0 ? i->simm + 1u : 1;
    w->pc = w->next;
    return true;
}

/* ---- scheduling ---- */
static bool release_barrier(struct emu_block *b) {
    for (unsigned n = 0; n < b->nwaves; n++)
        if (b->waves[n]->state == WAVE_BARRIER) {
            if (b->live < b->nwaves && b->l->opt.strict) {
                unsigned ended = 0;
                while (b->waves[ended]->state != WAVE_END)
                    ended++;
                b->waves[n]->pc -= 4;
                return emu_stop(b->waves[n], -1, "barrier not reached by all: wave %u has ended", ended);
            }
            b->waves[n]->state = WAVE_RUN;
        }
    b->epoch++;
    for (unsigned n = 0; n < b->nwaves; n++)
        emu_race_barrier(b->waves[n]);
    return true;
}

/* runs a random wave of the block for a random while; *done when no wave is left */
static bool run_burst(struct emu_block *b, bool *done) {
    unsigned ready[EMU_WAVES_MAX], n = 0;
    for (unsigned w = 0; w < b->nwaves; w++)
        if (b->waves[w]->state == WAVE_RUN)
            ready[n++] = w;
    *done = b->live == 0;
    if (*done)
        return true;
    if (!n)
        return release_barrier(b);
    uint64_t r = emu_rand(&b->rng);
    struct emu_wave *w = b->waves[ready[r % n]];
    unsigned length = r >> 32 & 7 ? 1 + (r >> 40 & 63) : 1 + (r >> 40 & 1023);
    while (length-- && w->state == WAVE_RUN)
        if (!step(w))
            return false;
    return true;
}

struct pool {
    struct emu_launch *l;
    pthread_mutex_t lock;
    uint64_t next, total, order; /* blocks are taken in the order next * order mod total */
    bool failed;
};

static bool take_block(struct pool *p, uint64_t *linear) {
    pthread_mutex_lock(&p->lock);
    bool got = !p->failed && p->next < p->total;
    if (got)
        *linear = (uint64_t)((unsigned __int128)p->next++ * p->order % p->total);
    pthread_mutex_unlock(&p->lock);
    return got;
}

static void fold(struct pool *p, const struct emu_block *b, const struct emu_error *error) {
    struct emu_launch *l = p->l;
    pthread_mutex_lock(&p->lock);
    if (error->code && !p->failed) {
        p->failed = true;
        l->error = *error;
    }
    for (unsigned n = 0; b && n < CNT_COUNT; n++)
        l->counters[n] += b->counters[n];
    for (unsigned n = 0; b && n < l->k->ninsts; n++)
        emu_add_stat(&l->stats[n], &b->stats[n]);
    pthread_mutex_unlock(&p->lock);
}

static void *worker(void *arg) {
    enum { RESIDENT_MAX = 8 };
    struct pool *p = arg;
    struct emu_block *resident[RESIDENT_MAX] = {};
    unsigned n = 0;
    uint64_t linear, rng = p->l->opt.seed ^ 0x626c6f636b73;
    uint64_t want = p->l->opt.blocks_per_thread;
    want = want < 1 ? 1 : want > RESIDENT_MAX ? RESIDENT_MAX : want;
    struct emu_error error = {};
    fenv_t caller; /* which may flush denormals */
    fegetenv(&caller);
    fesetenv(FE_DFL_ENV);
    while (n < want && take_block(p, &linear)) {
        resident[n] = make_block(p->l);
        if (!resident[n]) {
            emu_fail(&error, EMU_FAULT, "out of memory for a block");
            break;
        }
        start_block(resident[n++], linear);
    }
    unsigned active = error.code ? 0 : n;
    while (active && !error.code && !__atomic_load_n(&p->failed, __ATOMIC_RELAXED)) {
        unsigned pick = (unsigned)(emu_rand(&rng) % active);
        struct emu_block *b = resident[pick];
        bool done = false;
        if (!run_burst(b, &done))
            error = b->error;
        else if (done && take_block(p, &linear))
            start_block(b, linear);
        else if (done) {
            resident[pick] = resident[--active];
            resident[active] = b;
        }
    }
    for (unsigned k = 0; k < RESIDENT_MAX; k++)
        if (resident[k]) {
            fold(p, resident[k], &error);
            free_block(resident[k]);
        }
    if (error.code)
        fold(p, nullptr, &error);
    fesetenv(&caller);
    return nullptr;
}

static uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

bool emu_run(struct emu_launch *l) {
    struct pool p = {.l = l, .lock = PTHREAD_MUTEX_INITIALIZER};
    p.total = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    uint64_t rng = l->opt.seed;
    p.order = 1;
    if (l->opt.seed)
        do
            p.order = emu_rand(&rng) % p.total + 1;
        while (gcd(p.order, p.total) != 1);
    enum { THREADS_MAX = 16 };
    pthread_t threads[THREADS_MAX];
    uint64_t want = l->opt.threads < 1 ? 1 : l->opt.threads > THREADS_MAX ? THREADS_MAX : l->opt.threads, n = 0;
    if (want > p.total)
        want = p.total;
    if (l->opt.strict && l->opt.races)
        l->races = emu_races_new();
    if (l->opt.strict && l->opt.races && !l->races)
        return emu_fail(&l->error, EMU_FAULT, "out of memory for the marks of memory accesses");
    emu_mem_rdlock();
    while (n + 1 < want && !pthread_create(&threads[n], nullptr, worker, &p))
        n++;
    worker(&p);
    while (n)
        pthread_join(threads[--n], nullptr);
    emu_mem_unlock();
    emu_races_free(l->races);
    return !l->error.code;
}
