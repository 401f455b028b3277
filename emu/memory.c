/* One reader/writer lock: a launch reads the table while it runs, hipMalloc and hipFree write it. */
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct range {
    uint64_t base, bytes;
    bool writable;
};
static struct range *ranges; /* sorted by base, disjoint */
static size_t nranges, room;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

void emu_mem_rdlock(void) { pthread_rwlock_rdlock(&lock); }
void emu_mem_unlock(void) { pthread_rwlock_unlock(&lock); }

/* first range whose base is past addr */
static size_t upper(uint64_t addr) {
    size_t lo = 0, hi = nranges;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (ranges[mid].base <= addr)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool emu_mem_add(uint64_t base, uint64_t bytes, bool writable) {
    pthread_rwlock_wrlock(&lock);
    size_t at = upper(base);
    bool clash = (at && ranges[at - 1].base + ranges[at - 1].bytes > base) ||
                 (at < nranges && base + bytes > ranges[at].base) || !bytes;
    if (!clash && nranges == room) {
        size_t more = room ? 2 * room : 64;
        struct range *grown = realloc(ranges, more * sizeof *grown);
        if (grown) {
            ranges = grown;
            room = more;
        } else
            clash = true;
    }
    if (!clash) {
        memmove(ranges + at + 1, ranges + at, (nranges - at) * sizeof *ranges);
        ranges[at] = (struct range){base, bytes, writable};
        nranges++;
    }
    pthread_rwlock_unlock(&lock);
    return !clash;
}

bool emu_mem_remove(uint64_t base) {
    pthread_rwlock_wrlock(&lock);
    size_t at = upper(base);
    bool found = at && ranges[at - 1].base == base;
    if (found) {
        memmove(ranges + at - 1, ranges + at, (nranges - at) * sizeof *ranges);
        nranges--;
    }
    pthread_rwlock_unlock(&lock);
    return found;
}

bool emu_mem_find(uint64_t addr, uint64_t *lo, uint64_t *hi, bool *writable) {
    size_t at = upper(addr);
    if (!at || addr >= ranges[at - 1].base + ranges[at - 1].bytes)
        return false;
    *lo = ranges[at - 1].base;
    *hi = ranges[at - 1].base + ranges[at - 1].bytes;
    *writable = ranges[at - 1].writable;
    return true;
}
