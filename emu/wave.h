/* A launch while it runs: options, blocks, waves with their registers and accesses in flight, counters; how it stops.
 */
#ifndef EMU_WAVE_H
#define EMU_WAVE_H

#include "elf.h"

enum {
    EMU_LANES = 64,
    EMU_VGPRS = 512,
    EMU_SGPRS = 128,
    EMU_WAVES_MAX = 16,
    EMU_VMCNT_MAX = 63,
    EMU_LGKMCNT_MAX = 15,
    EMU_SMEM_MAX = 32,
};

typedef uint32_t emu_u32v __attribute__((vector_size(256))); /* one VGPR: 64 lanes */
typedef int32_t emu_i32v __attribute__((vector_size(256)));
typedef float emu_f32v __attribute__((vector_size(256)));

enum emu_oob : int { EMU_OOB_STOP, EMU_OOB_ZERO };
enum emu_fill : int { EMU_FILL_ZERO, EMU_FILL_KEEP };
enum emu_range : int { EMU_RANGE_RJ, EMU_RANGE_ISA };
enum emu_saddr : int { EMU_SADDR_ZEXT, EMU_SADDR_SEXT };
enum emu_edge : int { EMU_EDGE_ROUND, EMU_EDGE_OVERFLOW };
enum emu_scale255 : int { EMU_SCALE255_APPLY, EMU_SCALE255_KEEP };
enum emu_permlane : int { EMU_PERMLANE_ALL, EMU_PERMLANE_EXEC };
enum emu_sum : int { EMU_SUM_WIDE, EMU_SUM_RJ };
enum emu_landing : int { EMU_LAND_SEED, EMU_LAND_EARLY, EMU_LAND_LATE };
struct emu_options {
    uint64_t seed;
    bool strict;                /* all checks of check.c; results in flight land by seed */
    bool races;                 /* with strict: the checks of race.c */
    enum emu_oob oob;           /* buffer access past num_records: stop, or zero/drop as the hardware does */
    enum emu_fill fill;         /* LDS copy of what is past num_records: writes zeros to LDS, or nothing */
    enum emu_range range;       /* which reading of the buffer range check is executed */
    enum emu_saddr saddr;       /* GLOBAL with SGPR base: 32-bit offset zero- or sign-extended */
    enum emu_edge edge;         /* fp8 conversion of 448 < |x| < 464: rounds down, or overflows */
    enum emu_scale255 scale255; /* v_cvt_scalef32 with exponent 0xff: divides by 2^128, or keeps the destination */
    enum emu_permlane permlane; /* v_permlane*_swap: all lanes, or only those in EXEC */
    bool conflict_stop;         /* stop where one of these readings would make a difference */
    enum emu_sum sum;           /* MFMA accumulation model */
    enum emu_landing landing;
    uint64_t threads;           /* host threads; more than one gives up the order of blocks as a function of the seed */
    bool defer;                 /* streams run their work only when something waits for it */
    uint64_t max_insts;         /* per wave; 0 = no limit */
    uint64_t blocks_per_thread; /* blocks that interleave on one host thread */
};

/* Of one or many launches. LANE_ADDRS: lane addresses sent to memory. LINES: distinct 128-byte lines over each
 * vector memory instruction. LDS_PHASES: phases of LDS accesses without conflicts; LDS_CONFLICTS: those that bank
 * conflicts add. */
// clang-format off
#define EMU_COUNTERS(X)                                                                                                \
    X(INSTS) X(SALU) X(VALU) X(MFMA) X(DS) X(VMEM) X(SMEM) X(LDS_DMA) X(WAITCNT) X(BARRIER) X(BRANCH) X(NOP_STATES)    \
    X(LOAD_BYTES) X(STORE_BYTES) X(DMA_BYTES) X(SMEM_BYTES) X(LDS_READ_BYTES) X(LDS_WRITE_BYTES) X(LANE_ADDRS)         \
    X(LINES) X(LDS_PHASES) X(LDS_CONFLICTS) X(WAVES) X(BLOCKS)
// clang-format on
#define X(name) CNT_##name,
enum emu_counter { EMU_COUNTERS(X) CNT_COUNT };
#undef X

enum emu_pkind : uint8_t { P_LOAD, P_STORE, P_DMA, P_DSREAD, P_DSWRITE, P_DSLANE, P_SMEM, P_CLOCK, P_FLAT, P_ATOMIC };
struct emu_pend {
    const struct emu_inst *i;
    enum emu_pkind kind;
    bool landed;
    uint8_t bytes; /* of one element of one lane */
    uint8_t elems; /* 1, or 2 for read2/write2 */
    uint32_t dma;  /* P_DMA: LDS address of lane 0 */
    uint64_t exec;
    uint64_t addr[EMU_LANES];
    uint64_t addr1[EMU_LANES];   /* second element */
    uint8_t in_range[EMU_LANES]; /* bit per dword */
    uint32_t data[EMU_LANES][4];
};
struct emu_queue {
    struct emu_pend *slot;
    unsigned size, head, count, landed; /* landed: how many from head have taken effect */
};

struct emu_track { /* per VGPR: when it was last touched, in wait states */
    uint32_t valu, trans, half, mfma, srcc, store;
    uint8_t mfma_passes, srcc_passes, store_need;
    uint16_t mfma_dst, mfma_op;
};

enum emu_state : uint8_t { WAVE_RUN, WAVE_BARRIER, WAVE_END };

struct emu_block;
struct emu_wave {
    emu_u32v v[EMU_VGPRS];
    uint32_t s[EMU_SGPRS];
    bool scc;
    enum emu_state state;
    uint8_t id;
    bool ovfl;               /* MODE.FP16_OVFL */
    bool vccz_stale;         /* one half of VCC written alone by SALU */
    uint8_t gpr_idx;         /* s_set_gpr_idx mode: SRC0 1, SRC1 2, SRC2 4, DST 8 */
    struct emu_inst indexed; /* the current instruction with its registers indexed */
    bool land_random;
    bool land_early;
    uint32_t pc, next; /* byte offsets from the entry */
    uint32_t t;        /* wait-state clock */
    uint64_t live;     /* lanes that exist */
    uint64_t ninsts;
    uint64_t rng;
    struct emu_block *b;
    struct emu_queue vm, ds, sm;
    uint8_t vpend[EMU_VGPRS]; /* vector-memory loads in flight into the register */
    uint8_t dpend[EMU_VGPRS]; /* LDS reads in flight */
    uint8_t spend[EMU_SGPRS];
    struct emu_track track[EMU_VGPRS];
    uint32_t sgpr_valu[EMU_SGPRS]; /* clock of the last VALU write */
    uint32_t exec_valu, m0_salu, setreg;
    uint64_t cache_lo, cache_hi; /* last allocation hit */
    bool cache_w;
    uint8_t *scratch; /* private_segment bytes per lane */
};

struct emu_shadow { /* one LDS byte: who touched it, and in which barrier epoch that was complete */
    uint32_t w_epoch, r_epoch;
    uint16_t r_mask, r_pend;
    uint8_t w_wave, w_dma;
};

struct emu_launch;
struct emu_block {
    struct emu_launch *l;
    const struct emu_kernel *k;
    uint32_t id[3];
    unsigned nwaves, live;
    uint32_t epoch;
    uint8_t *lds;
    uint32_t lds_bytes;
    bool lds_started;
    uint64_t lds_seed;
    struct emu_shadow *shadow;
    struct emu_wave *waves[EMU_WAVES_MAX];
    uint64_t rng;
    struct emu_error error;
    uint64_t counters[CNT_COUNT];
    struct emu_stat *stats;
};

struct emu_launch {
    const struct emu_kernel *k;
    struct emu_options opt;
    uint32_t grid[3], block[3], dyn_lds;
    const uint8_t *kernarg;
    struct emu_error error;
    uint64_t counters[CNT_COUNT];
    struct emu_stat *stats;  /* one per instruction of k, zeroed by the caller */
    struct emu_races *races; /* null: not checked */
};

static inline uint64_t emu_exec(const struct emu_wave *w) {
    return w->s[EMU_EXEC] | (uint64_t)w->s[EMU_EXEC + 1] << 32;
}
static inline bool emu_strict(const struct emu_wave *w) { return w->b->l->opt.strict; }
/* null where no instruction starts */
const struct emu_inst *emu_inst_at(const struct emu_kernel *k, uint32_t pc);
/* stops the block: fills its error with kernel, pc, instruction, wave, lane and fmt. lane < 0: whole wave. false. */
bool emu_stop_with(enum emu_code code, struct emu_wave *w, int lane, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
#define emu_stop(...) emu_stop_with(EMU_FAULT, __VA_ARGS__)
#define emu_stop_memory(...) emu_stop_with(EMU_MEMORY_FAULT, __VA_ARGS__)
/* sources conflict and the verdict differs here: stops (true) unless the conflict_stop option is off */
bool emu_conflict(struct emu_wave *w, int lane, const char *what);
uint64_t emu_scalar(const struct emu_wave *w, const struct emu_operand *o);
void emu_scalar_write(struct emu_wave *w, const struct emu_operand *o, uint64_t value);

#endif
