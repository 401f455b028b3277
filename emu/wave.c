#include "wave.h"

#include <stdarg.h>
#include <stdio.h>

const struct emu_inst *emu_inst_at(const struct emu_kernel *k, uint32_t pc) {
    if (pc % 4 || pc >= k->code_bytes || !k->index[pc / 4])
        return nullptr;
    return &k->insts[k->index[pc / 4] - 1];
}

bool emu_stop_with(enum emu_code code, struct emu_wave *w, int lane, const char *fmt, ...) {
    struct emu_error *e = &w->b->error;
    if (e->code)
        return false; /* the first finding of a block stands */
    char what[512], text[256] = "outside the code", words[64] = "", at[32] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    const struct emu_inst *i = emu_inst_at(w->b->k, w->pc);
    if (i) {
        emu_disasm(i, text, sizeof text);
        for (unsigned n = 0; n < i->nwords; n++)
            snprintf(words + (size_t)9 * n, sizeof words - (size_t)9 * n, " %08x", i->words[n]);
    }
    if (lane >= 0)
        snprintf(at, sizeof at, ", lane %d", lane);
    return emu_fail(e, code, "%s: pc 0x%x, block (%u,%u,%u), wave %u%s: %s: %s [%s ]", w->b->k->name, w->pc,
                    w->b->id[0], w->b->id[1], w->b->id[2], w->id, at, what, text, words);
}

bool emu_conflict(struct emu_wave *w, int lane, const char *what) {
    if (!w->b->l->opt.strict || !w->b->l->opt.conflict_stop)
        return false;
    emu_stop(w, lane, "sources differ: %s", what);
    return true;
}

uint64_t emu_scalar(const struct emu_wave *w, const struct emu_operand *o) {
    if (o->file != EMU_SGPR)
        return o->value;
    if (o->dwords == 1)
        return w->s[o->reg];
    return w->s[o->reg] | (uint64_t)w->s[o->reg + 1] << 32;
}

void emu_scalar_write(struct emu_wave *w, const struct emu_operand *o, uint64_t value) {
    w->s[o->reg] = (uint32_t)value;
    if (o->dwords == 2)
        w->s[o->reg + 1] = (uint32_t)(value >> 32);
}
