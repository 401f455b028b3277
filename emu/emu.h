/* gfx950 instruction-level emulator: shared types.
 *
 * Files, each knows only those above it:
 * - insts.def: one line per instruction
 * - decode.c: words to struct emu_inst (operands, modifiers, register ranges); disasm.c: struct emu_inst to text
 * - elf.c: code object to struct emu_module and emu_kernel
 * - memory.c: live device allocations
 * - exec_scalar.c, exec_vector.c, exec_mfma.c, exec_memory.c: semantics
 * - check.c: wait states, registers in flight, LDS races; race.c: races through global memory
 * - machine.c: waves, counters, scheduling of one launch
 * - hip.c: libamdhip64's names over all of it, options, controls for tests
 *
 * Each file's head comment names the source of its rules. Errors travel up as text in
 * struct emu_error; nothing in the library prints or exits. */
#ifndef EMU_H
#define EMU_H

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    EMU_LANES = 64,
    EMU_VGPRS = 512,
    EMU_SGPRS = 128, /* 0-101 allocatable, then specials by their operand code */
    EMU_VCC = 106,
    EMU_M0 = 124,
    EMU_EXEC = 126,
    EMU_LDS_MAX = 163840,
    EMU_WAVES_MAX = 16,
    EMU_VMCNT_MAX = 63,
    EMU_LGKMCNT_MAX = 15,
    EMU_SMEM_MAX = 32,
};

typedef uint32_t emu_u32v __attribute__((vector_size(256))); /* one VGPR: 64 lanes */
typedef int32_t emu_i32v __attribute__((vector_size(256)));
typedef float emu_f32v __attribute__((vector_size(256)));

/* ---- errors ---- */
enum emu_code { EMU_OK = 0, EMU_BAD_IMAGE, EMU_OTHER_GPU, EMU_BAD_VALUE, EMU_FAULT, EMU_MEMORY_FAULT };
struct emu_error {
    enum emu_code code;
    char text[1024];
};
bool emu_fail(struct emu_error *e, enum emu_code code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* ---- options (environment MXFP8_EMU_<NAME>, or emu_set_option) ---- */
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

/* ---- decoded instructions ---- */
enum emu_enc : uint8_t {
    ENC_SOP1,
    ENC_SOP2,
    ENC_SOPK,
    ENC_SOPC,
    ENC_SOPP,
    ENC_SMEM,
    ENC_VOP1,
    ENC_VOP2,
    ENC_VOPC,
    ENC_VOP3,
    ENC_VOP3P,
    ENC_MFMA,
    ENC_DS,
    ENC_MUBUF,
    ENC_FLAT,
    ENC_GLOBAL,
    ENC_SCRATCH,
    ENC_COUNT
};

enum emu_file : uint8_t { EMU_NONE, EMU_SGPR, EMU_VGPR, EMU_CONST, EMU_SPECIAL };

struct emu_operand {
    enum emu_file file;
    uint8_t dwords;
    char type;      /* see insts.def */
    bool acc;       /* an AGPR */
    uint16_t reg;   /* SGPR number, or physical VGPR (AGPRs start at accum_offset) */
    uint16_t index; /* register number as written in assembly */
    uint16_t code;  /* source field as encoded */
    uint64_t value; /* constant */
};

enum emu_role : uint8_t { ROLE_VALU, ROLE_A, ROLE_B, ROLE_C, ROLE_SCALE, ROLE_MEM, ROLE_LANESEL, ROLE_MASK };
struct emu_regs { /* a run of registers an instruction touches */
    uint16_t reg;
    uint8_t n;
    enum emu_role role;
    bool vector;
};

enum emu_form : uint8_t { FORM_PLAIN, FORM_E64, FORM_SDWA, FORM_DPP };

struct emu_op;
struct emu_inst {
    const struct emu_op *op;
    uint32_t words[4];
    uint32_t pc; /* byte offset from the kernel's entry */
    uint8_t nwords;
    enum emu_form form;
    uint8_t ndst, nsrc, nreads, nwrites;
    struct emu_operand dst[2], src[5];
    struct emu_regs reads[10], writes[4];
    /* vector modifiers */
    uint8_t neg, abs, neg_hi, opsel, opsel_hi, omod;
    bool clamp;
    uint8_t cbsz, blgp, bitop3;
    uint16_t dpp_ctrl;
    uint8_t row_mask, bank_mask;
    bool bound_ctrl;
    uint8_t dst_sel, dst_unused, src_sel[2];
    bool src_sext[2];
    /* scalar */
    uint16_t simm;
    /* memory */
    int32_t offset;
    uint8_t offset0, offset1;
    bool offen, idxen, lds, sc0, sc1, nt, gds, soffset_en, imm_en;
    struct emu_operand saddr, soffset;
    char fault[96]; /* decoding failed: why; the instruction stops when reached */
};

struct emu_wave;
struct emu_salu { /* scalar semantics: a, b in; d preloaded with the old destination; scc in and out */
    struct emu_wave *w;
    const struct emu_inst *i;
    uint64_t a, b, d;
    bool scc;
};
struct emu_vctx { /* vector semantics on whole registers: s[n] points at dwords x 64 lanes */
    struct emu_wave *w;
    const struct emu_inst *i;
    const emu_u32v *s[3];
    emu_u32v d[2]; /* preloaded with the old destination where the op reads it */
    uint64_t exec, cin, mask;
    emu_u32v tmp[3][2];
};
typedef void emu_salu_fn(struct emu_salu *);
typedef void emu_lane_fn(struct emu_vctx *);
typedef bool emu_run_fn(struct emu_wave *, const struct emu_inst *);

enum emu_flag : uint32_t {
    OPF_NOSUFFIX = 1, /* assembly name has no _e32/_e64 */
    OPF_TRANS = 2,    /* transcendental unit: one wait state to a non-trans VALU */
    OPF_READS_D = 4,  /* destination is also a source */
    OPF_HALF = 8,     /* writes half a register by op_sel[3], keeps the other half */
    OPF_LANESEL = 16, /* reads lanes of a VGPR as scalar */
    OPF_SWAP = 32,    /* v_permlane*_swap */
    OPF_NODSTSEL = 64,
    OPF_DIVFMAS = 128,
    OPF_CMPX = 256,
    OPF_STORE = 512,
    OPF_D16 = 1024, /* loads half a register, keeps the other half */
    OPF_VOP3B = 2048,
    OPF_OPSEL = 4096, /* op_sel picks a half of a 32-bit source */
    OPF_ATOMIC = 8192,
};

struct emu_op {
    const char *name;
    enum emu_enc enc;
    uint16_t opcode;
    const char *operands;
    uint32_t flags;
    int32_t arg;
    emu_salu_fn *s;
    emu_lane_fn *v;
    emu_run_fn *run;
};

/* decode.c */
struct emu_decode_env {
    unsigned accum_offset, vgprs, sgprs; /* limits from the kernel descriptor */
};
bool emu_decode(const uint32_t *words, size_t left, const struct emu_decode_env *env, struct emu_inst *out);
size_t emu_op_table(const struct emu_op **table);
/* disasm.c: text as llvm-objdump writes it, without the comment */
void emu_disasm(const struct emu_inst *i, char *text, size_t size);

/* ---- modules ---- */
struct emu_arg {
    uint32_t offset, size;
    char kind[40];
};
struct emu_stat { /* of one instruction of a kernel, over all waves */
    uint64_t hits;
    uint64_t vm, lgkm; /* s_waitcnt: accesses that it found in flight and waited for */
};
struct emu_kernel {
    char name[256];
    struct emu_module *module;
    uint32_t group_segment, private_segment, kernarg_size, max_flat_wg, sgpr_count, vgpr_count;
    uint32_t rsrc1, rsrc2, rsrc3, props, preload;
    uint64_t entry, code_bytes; /* addresses inside the loaded image */
    struct emu_arg *args;
    unsigned nargs;
    struct emu_decode_env env;
    uint32_t *index; /* code_bytes/4 entries: instruction number + 1, 0 = not a boundary */
    struct emu_inst *insts;
    struct emu_stat *stats; /* since the module was loaded */
    char refusal[160];      /* why it cannot be launched: something it asks for is not modelled */
    uint32_t ninsts;
};
struct emu_module {
    uint8_t *image; /* PT_LOADs at their addresses */
    size_t bytes;
    uint64_t segments[16]; /* bases of the registered ones */
    unsigned nsegments;
    struct emu_kernel *kernels;
    unsigned nkernels;
};
struct emu_module *emu_module_load(const void *elf, struct emu_error *e);
void emu_module_free(struct emu_module *m);

/* ---- memory ---- (memory.c) */
void emu_mem_rdlock(void);
void emu_mem_unlock(void);
bool emu_mem_add(uint64_t base, uint64_t bytes, bool writable);
bool emu_mem_remove(uint64_t base);
/* finds the live allocation that holds addr; caller holds the lock */
bool emu_mem_find(uint64_t addr, uint64_t *lo, uint64_t *hi, bool *writable);

/* ---- counters: numbers of one or many launches since the last reset ---- */
enum emu_counter {
    CNT_INSTS,
    CNT_SALU,
    CNT_VALU,
    CNT_MFMA,
    CNT_DS,
    CNT_VMEM,
    CNT_SMEM,
    CNT_LDS_DMA,
    CNT_WAITCNT,
    CNT_BARRIER,
    CNT_BRANCH,
    CNT_NOP_STATES,
    CNT_LOAD_BYTES,
    CNT_STORE_BYTES,
    CNT_DMA_BYTES,
    CNT_SMEM_BYTES,
    CNT_LDS_READ_BYTES,
    CNT_LDS_WRITE_BYTES,
    CNT_LANE_ADDRS,    /* lane addresses sent to memory */
    CNT_LINES,         /* distinct 128-byte lines over each VMEM instruction */
    CNT_LDS_PHASES,    /* LDS access phases without conflicts */
    CNT_LDS_CONFLICTS, /* extra phases that bank conflicts add */
    CNT_WAVES,
    CNT_BLOCKS,
    CNT_COUNT
};

/* ---- a running wave ---- */
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
    uint32_t addr1[EMU_LANES];   /* second element */
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
/* runs the launch to its end; false with l->error set when it stopped */
bool emu_run(struct emu_launch *l);

/* ---- helpers shared by exec_*.c ---- */
static inline uint64_t emu_exec(const struct emu_wave *w) {
    return w->s[EMU_EXEC] | (uint64_t)w->s[EMU_EXEC + 1] << 32;
}
static const uint64_t emu_golden = 0x9e3779b97f4a7c15u;
static inline uint64_t emu_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static inline uint64_t emu_rand(uint64_t *state) { return emu_mix(*state += emu_golden); } /* splitmix64 */
void emu_lds_start(struct emu_block *b);                                                   /* machine.c */
bool emu_strict(const struct emu_wave *w);
/* stops the block: fills its error with kernel, pc, instruction, wave, lane and fmt. lane < 0: whole wave. false. */
bool emu_stop(struct emu_wave *w, int lane, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
bool emu_stop_memory(struct emu_wave *w, int lane, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* sources conflict and the verdict differs here: stops (true) unless the conflict_stop option is off */
bool emu_conflict(struct emu_wave *w, int lane, const char *what);
uint64_t emu_scalar(const struct emu_wave *w, const struct emu_operand *o);
void emu_scalar_write(struct emu_wave *w, const struct emu_operand *o, uint64_t value);
emu_u32v emu_expand(uint64_t mask);
float emu_fp8_to_f32(uint8_t code, int fmt); /* fmt: 0 E4M3, 1 E5M2, 2 E2M3, 3 E3M2, 4 E2M1 */
/* RNE to E4M3 (fmt 0) or E5M2 (1); *edge set when the overflow rule decides and sources leave it open */
uint8_t emu_f32_to_fp8(float x, int fmt, bool ovfl, bool *edge);
uint16_t emu_f32_to_bf16(float x);

/* exec_scalar.c, exec_vector.c */
bool emu_exec_salu(struct emu_wave *w, const struct emu_inst *i);
bool emu_exec_valu(struct emu_wave *w, const struct emu_inst *i);
/* *out = *i with the registers that the wave's GPR index mode moves; false when it stops */
bool emu_index_registers(struct emu_wave *w, const struct emu_inst *i, struct emu_inst *out);
/* exec_memory.c */
void emu_land(struct emu_wave *w, struct emu_pend *p);
void emu_retire_vm(struct emu_wave *w, unsigned left);
void emu_retire_lgkm(struct emu_wave *w, unsigned left);
/* check.c */
bool emu_check(struct emu_wave *w, const struct emu_inst *i);
void emu_track_writes(struct emu_wave *w, const struct emu_inst *i);
enum emu_lds_kind { LDS_READ, LDS_WRITE, LDS_DMA };
bool emu_lds_issue(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes, int lane);
void emu_lds_retire(struct emu_wave *w, enum emu_lds_kind kind, uint32_t addr, unsigned bytes);
void emu_lds_remark(struct emu_wave *w); /* at a barrier: what is in flight stays unordered */
int emu_mfma_passes(const struct emu_inst *i);
/* race.c */
struct emu_races;
struct emu_races *emu_races_new(void); /* of one launch */
void emu_races_free(struct emu_races *r);
bool emu_race_scalar(struct emu_wave *w, uint64_t addr, size_t bytes); /* a load */
bool emu_race_lanes(struct emu_wave *w, const struct emu_pend *p);     /* loads or stores, at issue */
void emu_race_barrier(struct emu_wave *w); /* stores in flight at a barrier are not ordered by it */

#endif
