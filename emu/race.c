/* Races through global memory inside one launch: two waves, or two lanes of one store, that nothing orders touch the
 * same byte, and one of them writes. Blocks are never ordered; waves of a block are, when a barrier lies between and,
 * of a store, its wait before it. Writing what another wave wrote, the same value, is no race. Atomics are left out:
 * what they synchronize is not modelled.
 *
 * Every byte has a mark of its last write (with the value) and one of its reads: block, barrier epoch and wave. Marks
 * live in pages that are made when first touched and kept from launch to launch. Marks of blocks whose numbers are
 * equal modulo TAGS look alike, which can hide a race and never makes one up. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* A mark: 0 = untouched, else tag << 22 | epoch % EPOCHS << 5 | wave. Tag = block number % TAGS + 1. */
typedef uint32_t mark;
enum : uint32_t { PAGE = 4096, TAGS = 1022, EPOCHS = 1 << 17 };
enum : uint32_t { TAG_BITS = 1023u << 22, SEVERAL_BLOCKS = TAG_BITS, WAVE_BITS = 31, SEVERAL_WAVES = 31 };

struct page {
    mark write[PAGE], read[PAGE];
    uint8_t value[PAGE];
    uint64_t number; /* of the page, address / PAGE */
    struct page *next;
};

struct emu_races {
    struct page *last;
    struct page **slot; /* open addressing by page number */
    size_t slots, used;
    pthread_mutex_t lock;
};

static struct page *spare; /* one launch runs at a time */
static size_t spares;

struct emu_races *emu_races_new(void) {
    enum { SLOTS = 1024 };
    struct emu_races *r = calloc(1, sizeof *r);
    struct page **slot = (struct page **)calloc(SLOTS, sizeof(struct page *));
    if (!r || !slot) {
        free(r);
        free((void *)slot);
        return nullptr;
    }
    r->slot = slot;
    r->slots = SLOTS;
    pthread_mutex_init(&r->lock, nullptr);
    return r;
}

void emu_races_free(struct emu_races *r) {
    enum { KEPT = 4096 };
    if (!r)
        return;
    for (size_t n = 0; n < r->slots; n++) {
        struct page *p = r->slot[n];
        if (p && spares < KEPT) {
            p->next = spare;
            spare = p;
            spares++;
        } else
            free(p);
    }
    pthread_mutex_destroy(&r->lock);
    free((void *)r->slot);
    free(r);
}

static struct page **find_slot(struct page **slot, size_t slots, uint64_t number) {
    size_t at = emu_mix(number) & (slots - 1);
    while (slot[at] && slot[at]->number != number)
        at = (at + 1) & (slots - 1);
    return &slot[at];
}

static bool grow(struct emu_races *r) {
    struct page **more = (struct page **)calloc(2 * r->slots, sizeof(struct page *));
    if (!more)
        return false;
    for (size_t n = 0; n < r->slots; n++)
        if (r->slot[n])
            *find_slot(more, 2 * r->slots, r->slot[n]->number) = r->slot[n];
    free((void *)r->slot);
    r->slot = more;
    r->slots *= 2;
    return true;
}

static struct page *new_page(struct emu_races *r, uint64_t number) {
    if (2 * ++r->used > r->slots && !grow(r))
        return nullptr;
    struct page *p = spare;
    if (p) {
        spare = p->next;
        spares--;
    } else
        p = malloc(sizeof *p);
    if (!p)
        return nullptr;
    memset(p, 0, sizeof *p);
    p->number = number;
    return *find_slot(r->slot, r->slots, number) = p;
}

static struct page *page_of(struct emu_races *r, uint64_t number) {
    if (r->last && r->last->number == number)
        return r->last;
    struct page *p = *find_slot(r->slot, r->slots, number);
    return r->last = p ? p : new_page(r, number);
}

static mark mark_of(const struct emu_wave *w) {
    const struct emu_block *b = w->b;
    const uint32_t *grid = b->l->grid;
    uint64_t linear = ((uint64_t)b->id[2] * grid[1] + b->id[1]) * grid[0] + b->id[0];
    return (uint32_t)(linear % TAGS + 1) << 22 | b->epoch % EPOCHS << 5 | w->id;
}

/* what `m` did is neither this wave's own nor before a barrier of its block */
static inline bool unordered(mark m, mark me) {
    mark d = m ^ me; /* not 0 and in the wave bits alone, or in the tag */
    return (m != 0) & (((d & TAG_BITS) != 0) | (d - 1 < WAVE_BITS));
}

static bool stop(struct emu_wave *w, int lane, uint64_t addr, const char *mine, mark other, const char *theirs) {
    return emu_stop(w, lane, "memory race at 0x%llx: %s, and another %s %s%s", (unsigned long long)addr, mine,
                    (other ^ mark_of(w)) & TAG_BITS ? "block's" : "wave's", theirs,
                    (other ^ mark_of(w)) & TAG_BITS ? "" : " has no barrier between");
}

/* the loops have no branches and mostly a known length: they become vector code */
static inline __attribute__((always_inline)) bool read_marks(struct emu_wave *w, int lane, uint64_t addr, size_t bytes,
                                                             struct page *p, mark me) {
    mark *read = &p->read[addr % PAGE], *written = &p->write[addr % PAGE];
    unsigned races = 0;
    for (size_t n = 0; n < bytes; n++)
        races |= unordered(written[n], me);
    for (size_t n = 0; races && n < bytes; n++)
        if (unordered(written[n], me))
            return stop(w, lane, addr + n, "load", written[n], "store");
    for (size_t n = 0; n < bytes; n++) {
        mark both = (read[n] ^ me) & TAG_BITS ? (mark)SEVERAL_BLOCKS : me | SEVERAL_WAVES;
        read[n] = unordered(read[n], me) ? both : me;
    }
    return true;
}

static bool read_bytes(struct emu_wave *w, int lane, uint64_t addr, size_t bytes, struct page *p, mark me) {
    if (bytes == 4)
        return read_marks(w, lane, addr, 4, p, me);
    if (bytes == 16)
        return read_marks(w, lane, addr, 16, p, me);
    return read_marks(w, lane, addr, bytes, p, me);
}

static bool write_bytes(struct emu_wave *w, int lane, uint64_t addr, size_t bytes, struct page *p, mark me,
                        const uint8_t *value) {
    mark *read = &p->read[addr % PAGE], *written = &p->write[addr % PAGE];
    uint8_t *there = &p->value[addr % PAGE];
    for (size_t n = 0; n < bytes; n++) {
        if (unordered(written[n], me) && there[n] != value[n])
            return stop(w, lane, addr + n, "store", written[n], "store of another value");
        if (unordered(read[n], me))
            return stop(w, lane, addr + n, "store", read[n], "load");
        written[n] = me;
        there[n] = value[n];
    }
    return true;
}

/* value: what a store writes, null for a load */
static bool touch(struct emu_wave *w, int lane, uint64_t addr, size_t bytes, const uint8_t *value, mark me) {
    while (bytes) {
        size_t room = PAGE - addr % PAGE, n = bytes < room ? bytes : room;
        struct page *p = page_of(w->b->l->races, addr / PAGE);
        if (!p)
            return emu_stop(w, lane, "out of memory for the marks of memory accesses");
        if (!(value ? write_bytes(w, lane, addr, n, p, me, value) : read_bytes(w, lane, addr, n, p, me)))
            return false;
        addr += n;
        bytes -= n;
        value = value ? value + n : nullptr;
    }
    return true;
}

bool emu_race_scalar(struct emu_wave *w, uint64_t addr, size_t bytes) {
    if (!w->b->l->races)
        return true;
    pthread_mutex_lock(&w->b->l->races->lock);
    bool ok = touch(w, -1, addr, bytes, nullptr, mark_of(w));
    pthread_mutex_unlock(&w->b->l->races->lock);
    return ok;
}

static bool touch_lane(struct emu_wave *w, const struct emu_pend *p, unsigned l, mark me) {
    const uint8_t *value = p->kind == P_STORE ? (const uint8_t *)p->data[l] : nullptr;
    size_t part = p->bytes < 4 ? p->bytes : 4, parts = p->bytes / part;
    if ((p->in_range[l] & ((1u << parts) - 1)) == (1u << parts) - 1)
        return touch(w, (int)l, p->addr[l], p->bytes, value, me);
    for (size_t n = 0; n < parts; n++)
        if (p->in_range[l] >> n & 1 &&
            !touch(w, (int)l, p->addr[l] + n * part, part, value ? value + n * part : nullptr, me))
            return false;
    return true;
}

/* of the lanes of one store that write one byte any may come last */
static bool lanes_agree(struct emu_wave *w, const struct emu_pend *p, unsigned l) {
    const uint8_t *value = (const uint8_t *)p->data[l];
    size_t part = p->bytes < 4 ? p->bytes : 4;
    for (size_t n = 0; n < p->bytes; n++) {
        uint64_t at = p->addr[l] + n;
        if (p->in_range[l] >> n / part & 1 && page_of(w->b->l->races, at / PAGE)->value[at % PAGE] != value[n])
            return emu_stop(w, (int)l, "memory race at 0x%llx: store, and another lane stores another value",
                            (unsigned long long)at);
    }
    return true;
}

bool emu_race_lanes(struct emu_wave *w, const struct emu_pend *p) {
    if (!w->b->l->races || p->kind == P_ATOMIC)
        return true;
    bool ok = true;
    mark me = mark_of(w);
    pthread_mutex_lock(&w->b->l->races->lock);
    for (unsigned l = 0; ok && l < EMU_LANES; l++)
        if (p->exec >> l & 1)
            ok = touch_lane(w, p, l, me);
    for (unsigned l = 0; ok && p->kind == P_STORE && l < EMU_LANES; l++)
        if (p->exec >> l & 1)
            ok = lanes_agree(w, p, l);
    pthread_mutex_unlock(&w->b->l->races->lock);
    return ok;
}

void emu_race_barrier(struct emu_wave *w) {
    if (!w->b->l->races)
        return;
    for (unsigned n = 0; n < w->vm.count; n++) {
        const struct emu_pend *p = &w->vm.slot[(w->vm.head + n) % w->vm.size];
        if (p->kind == P_STORE && p->i->op->enc != ENC_SCRATCH)
            emu_race_lanes(w, p);
    }
}
