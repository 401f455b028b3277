#include "flight.h"

#include <pthread.h>
#include <string.h>

#include "check.h"
#include "formats.h"

/* ---- landing ---- */
static void set_register(struct emu_wave *w, const struct emu_pend *p, unsigned l, unsigned elem, const uint8_t *from) {
    const struct emu_inst *i = p->i;
    unsigned reg = i->dst[0].reg;
    if (p->bytes >= 4) {
        for (size_t dw = 0; dw < p->bytes / 4u; dw++) {
            uint32_t x;
            memcpy(&x, from + 4 * dw, 4);
            w->v[reg + elem * (p->bytes / 4u) + dw][l] = x;
        }
        return;
    }
    uint32_t x = 0;
    memcpy(&x, from, p->bytes);
    if (i->op->arg < 0)
        x = p->bytes == 1 ? (uint32_t)(int8_t)x : (uint32_t)(int16_t)x;
    uint32_t old = w->v[reg][l];
    bool high = strstr(i->op->name, "_d16_hi");
    if (i->op->flags & OPF_D16)
        x = high ? (old & 0xffff) | x << 16 : (old & 0xffff0000) | (x & 0xffff);
    w->v[reg][l] = x;
}

/* bytes of lane l as the instruction sees them: memory where in range, zero elsewhere */
static void fetch_lane(const struct emu_pend *p, unsigned l, uint8_t out[16]) {
    memset(out, 0, 16);
    size_t part = p->bytes < 4 ? p->bytes : 4;
    for (size_t dw = 0; dw * part < p->bytes; dw++)
        if (p->in_range[l] >> dw & 1)
            memcpy(out + dw * part, (const void *)(p->addr[l] + dw * part), part);
}

static void land_transposed(struct emu_wave *w, const struct emu_pend *p) {
    uint8_t in[EMU_LANES][8], out[8];
    for (unsigned l = 0; l < EMU_LANES; l++)
        memcpy(in[l], w->b->lds + p->addr[l], 8);
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (p->i->op->opcode == 226)
            for (unsigned n = 0; n < 8; n++)
                out[n] = in[((l & ~15u) | (l >> 3 & 1)) + 2 * n][l & 7];
        else
            for (unsigned n = 0; n < 4; n++)
                memcpy(out + (size_t)2 * n, in[((l & ~15u) | (l >> 2 & 3)) + 4 * n] + (size_t)2 * (l & 3), 2);
        set_register(w, p, l, 0, out);
    }
}

static float bf16(uint32_t half) { return __builtin_bit_cast(float, half << 16); }

/* what an atomic leaves in memory where `old` was; data: its operand, after which cmpswap has what it compares with */
static uint64_t atomic_result(const struct emu_inst *i, uint64_t old, const uint32_t *data) {
    uint32_t a = (uint32_t)old, b = data[0];
    uint64_t wide = b | (uint64_t)data[1] << 32;
    switch (i->op->opcode) {
    case 64:
        return b;
    case 65:
        return a == data[1] ? b : a;
    case 66:
        return a + b;
    case 67:
        return a - b;
    case 68:
        return (int32_t)a < (int32_t)b ? a : b;
    case 69:
        return a < b ? a : b;
    case 70:
        return (int32_t)a > (int32_t)b ? a : b;
    case 71:
        return a > b ? a : b;
    case 72:
        return a & b;
    case 73:
        return a | b;
    case 74:
        return a ^ b;
    case 77:
        return __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, a) + __builtin_bit_cast(float, b));
    case 79:
        return __builtin_bit_cast(uint64_t, __builtin_bit_cast(double, old) + __builtin_bit_cast(double, wide));
    case 82:
        return emu_f32_to_bf16(bf16(a & 0xffff) + bf16(b & 0xffff)) |
               (uint32_t)emu_f32_to_bf16(bf16(a >> 16) + bf16(b >> 16)) << 16;
    default:
        return old + wide;
    }
}

static void land_atomic(struct emu_wave *w, const struct emu_pend *p, unsigned l) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    uint64_t old = 0;
    pthread_mutex_lock(&one_at_a_time);
    memcpy(&old, (const void *)p->addr[l], p->bytes);
    uint64_t now = atomic_result(p->i, old, p->data[l]);
    memcpy((void *)p->addr[l], &now, p->bytes);
    pthread_mutex_unlock(&one_at_a_time);
    if (p->i->ndst)
        set_register(w, p, l, 0, (const uint8_t *)&old);
}

static void land_lane(struct emu_wave *w, const struct emu_pend *p, unsigned l) {
    uint8_t bytes[16];
    size_t part = p->bytes < 4 ? p->bytes : 4;
    switch (p->kind) {
    case P_LOAD:
        fetch_lane(p, l, bytes);
        set_register(w, p, l, 0, bytes);
        break;
    case P_STORE:
        for (size_t dw = 0; dw * part < p->bytes; dw++)
            if (p->in_range[l] >> dw & 1)
                memcpy((void *)(p->addr[l] + dw * part), (const uint8_t *)p->data[l] + dw * part, part);
        break;
    case P_ATOMIC:
        land_atomic(w, p, l);
        break;
    case P_DMA:
        fetch_lane(p, l, bytes);
        for (size_t dw = 0; dw * part < p->bytes; dw++)
            if (p->in_range[l] >> dw & 1 || w->b->l->opt.fill == EMU_FILL_ZERO)
                memcpy(w->b->lds + p->dma + (size_t)(l * emu_dma_step(p)) + dw * part, bytes + dw * part, part);
        break;
    case P_DSREAD:
        set_register(w, p, l, 0, w->b->lds + p->addr[l]);
        if (p->elems == 2)
            set_register(w, p, l, 1, w->b->lds + p->addr1[l]);
        break;
    case P_DSWRITE:
        memcpy(w->b->lds + p->addr[l], p->data[l], p->bytes);
        if (p->elems == 2)
            memcpy(w->b->lds + p->addr1[l], (const uint8_t *)p->data[l] + p->bytes, p->bytes);
        break;
    case P_DSLANE:
        w->v[p->i->dst[0].reg][l] = p->data[l][0];
        break;
    case P_CLOCK:
    case P_FLAT:
    case P_SMEM:
        break;
    }
}

static void land(struct emu_wave *w, struct emu_pend *p) {
    if (p->kind == P_SMEM) {
        memcpy(&w->s[p->i->dst[0].reg], (const void *)p->addr[0], (size_t)4 * p->i->dst[0].dwords);
        return;
    }
    if (p->kind == P_FLAT)
        return;
    if (p->kind == P_CLOCK) {
        emu_scalar_write(w, &p->i->dst[0], p->addr[0]);
        return;
    }
    if (p->kind == P_DSREAD && (p->i->op->opcode == 226 || p->i->op->opcode == 227) && p->i->op->enc == ENC_DS) {
        land_transposed(w, p);
        return;
    }
    for (unsigned l = 0; l < EMU_LANES; l++)
        if (p->exec >> l & 1)
            land_lane(w, p, l);
}

/* ---- queues ---- */
static struct emu_pend *slot(struct emu_queue *q, unsigned n) { return &q->slot[(q->head + n) % q->size]; }

static void mark_registers(struct emu_wave *w, const struct emu_inst *i, int step) {
    for (unsigned n = 0; n < i->ndst; n++)
        for (unsigned r = i->dst[n].reg; r < i->dst[n].reg + i->dst[n].dwords; r++)
            if (i->dst[n].file == EMU_SGPR)
                w->spend[r] = (uint8_t)(w->spend[r] + step);
            else if (i->op->enc == ENC_DS)
                w->dpend[r] = (uint8_t)(w->dpend[r] + step);
            else
                w->vpend[r] = (uint8_t)(w->vpend[r] + step);
}

static void retire_lds(struct emu_wave *w, const struct emu_pend *p) {
    for (unsigned l = 0; l < EMU_LANES; l++) {
        if (!(p->exec >> l & 1))
            continue;
        if (p->kind == P_DMA)
            emu_lds_retire(w, LDS_DMA, p->dma + l * emu_dma_step(p), p->bytes);
        else if (p->kind == P_DSREAD || p->kind == P_DSWRITE) {
            enum emu_lds_kind kind = p->kind == P_DSREAD ? LDS_READ : LDS_WRITE;
            emu_lds_retire(w, kind, (uint32_t)p->addr[l], p->bytes);
            if (p->elems == 2)
                emu_lds_retire(w, kind, (uint32_t)p->addr1[l], p->bytes);
        }
    }
}

static void retire_oldest(struct emu_wave *w, struct emu_queue *q) {
    struct emu_pend *p = slot(q, 0);
    if (!q->landed)
        land(w, p);
    else
        q->landed--;
    mark_registers(w, p->i, -1);
    if (emu_strict(w))
        retire_lds(w, p);
    q->head = (q->head + 1) % q->size;
    q->count--;
}

void emu_retire_vm(struct emu_wave *w, unsigned left) {
    while (w->vm.count > left)
        retire_oldest(w, &w->vm);
}

/* DS returns in order, so all but the last `left` of them are back whatever SMEM does; SMEM returns in any order, so
 * only a wait for zero proves anything about it. */
void emu_retire_lgkm(struct emu_wave *w, unsigned left) {
    while (w->ds.count > left)
        retire_oldest(w, &w->ds);
    if (left)
        return;
    for (unsigned n = 0; n < w->sm.count; n++) {
        struct emu_pend *p = slot(&w->sm, n);
        if (!p->landed)
            land(w, p);
        mark_registers(w, p->i, -1);
    }
    w->sm.count = w->sm.head = 0;
}

struct emu_pend *emu_push(struct emu_wave *w, struct emu_queue *q, const struct emu_inst *i, enum emu_pkind kind) {
    unsigned max = q == &w->vm ? EMU_VMCNT_MAX : q == &w->ds ? EMU_LGKMCNT_MAX : EMU_SMEM_MAX;
    if (q->count == max) { /* a saturated counter stalls issue until the oldest is back */
        if (q == &w->sm)
            emu_retire_lgkm(w, 0);
        else
            retire_oldest(w, q);
    }
    struct emu_pend *p = slot(q, q->count);
    p->i = i;
    p->kind = kind;
    p->landed = false;
    p->elems = 1;
    p->exec = emu_exec(w);
    return p;
}

static bool lands_now(struct emu_wave *w) {
    if (!emu_strict(w))
        return true;
    return w->land_random ? emu_rand(&w->rng) & 1 : w->land_early;
}

bool emu_commit(struct emu_wave *w, struct emu_queue *q) {
    struct emu_pend *p = slot(q, q->count++);
    mark_registers(w, p->i, 1);
    if (q == &w->sm) {
        if (lands_now(w)) {
            land(w, p);
            p->landed = true;
        }
    } else if (lands_now(w))
        for (; q->landed < q->count; q->landed++)
            land(w, slot(q, q->landed));
    return true;
}
