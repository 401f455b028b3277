/* Code objects: ELF image, kernel descriptors, metadata (msgpack note), and the decoded text of each kernel.
 * Source: LLVM's AMDGPUUsage (kernel descriptor, code object V5/V6 metadata).
 * Accepted: gfx950, code object V5 or V6, wave64, MODE = RNE, denormals kept, IEEE, DX10_CLAMP. Others are refused by
 * name. */
#include "elf.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

enum { EM_AMDGPU_ID = 224, MACH_GFX950 = 0x4f, OSABI_HSA = 64, NT_METADATA = 32, R_RELATIVE64 = 13 };

struct elf {
    const uint8_t *file;
    const Elf64_Ehdr *h;
    const Elf64_Phdr *ph;
    const Elf64_Shdr *sh;
};

/* ---- msgpack: only what a reader of known keys needs ---- */
struct pack {
    const uint8_t *p, *end;
};
enum item_kind { ITEM_OTHER, ITEM_MAP, ITEM_ARRAY, ITEM_TEXT, ITEM_UINT }; /* OTHER: past the end, too */
struct item {
    enum item_kind kind;
    uint64_t n; /* pairs, elements, bytes, or the value */
    const char *text;
};

static uint64_t big(struct pack *m, unsigned bytes) {
    uint64_t x = 0;
    if ((size_t)(m->end - m->p) < bytes) {
        m->p = m->end;
        return 0;
    }
    while (bytes--)
        x = x << 8 | *m->p++;
    return x;
}

static struct item text_item(struct pack *m, uint64_t n) {
    if ((uint64_t)(m->end - m->p) < n)
        n = (uint64_t)(m->end - m->p);
    struct item it = {ITEM_TEXT, n, (const char *)m->p};
    m->p += n;
    return it;
}

static struct item next_item(struct pack *m) {
    if (m->p >= m->end)
        return (struct item){};
    uint8_t b = *m->p++;
    if (b < 0x80)
        return (struct item){ITEM_UINT, b, nullptr};
    if (b < 0x90)
        return (struct item){ITEM_MAP, b & 15, nullptr};
    if (b < 0xa0)
        return (struct item){ITEM_ARRAY, b & 15, nullptr};
    if (b < 0xc0)
        return text_item(m, b & 31);
    /* 0xc0 to 0xdf: what follows the byte, and in how many bytes its number stands */
    static const struct {
        enum item_kind kind;
        uint8_t bytes;
    } wide[32] = {
        // clang-format off
        [0x04] = {ITEM_TEXT, 1}, {ITEM_TEXT, 2}, {ITEM_TEXT, 4},                     /* bytes */
        [0x0a] = {ITEM_OTHER, 4}, {ITEM_OTHER, 8},                                   /* floats */
        [0x0c] = {ITEM_UINT, 1}, {ITEM_UINT, 2}, {ITEM_UINT, 4}, {ITEM_UINT, 8},
        [0x10] = {ITEM_OTHER, 1}, {ITEM_OTHER, 2}, {ITEM_OTHER, 4}, {ITEM_OTHER, 8}, /* signed */
        [0x19] = {ITEM_TEXT, 1}, {ITEM_TEXT, 2}, {ITEM_TEXT, 4},
        [0x1c] = {ITEM_ARRAY, 2}, {ITEM_ARRAY, 4},
        [0x1e] = {ITEM_MAP, 2}, {ITEM_MAP, 4},
        // clang-format on
    };
    if (b >= 0xe0)
        return (struct item){ITEM_OTHER, 0, nullptr};
    enum item_kind kind = wide[b - 0xc0].kind;
    uint64_t n = big(m, wide[b - 0xc0].bytes);
    return kind == ITEM_TEXT ? text_item(m, n) : (struct item){kind, n, nullptr};
}

static void skip_item(struct pack *m) {
    struct item it = next_item(m);
    uint64_t n = it.kind == ITEM_MAP ? 2 * it.n : it.kind == ITEM_ARRAY ? it.n : 0;
    while (n-- && m->p < m->end)
        skip_item(m);
}

static bool is_text(const struct item *it, const char *text) {
    return it->kind == ITEM_TEXT && it->n == strlen(text) && !memcmp(it->text, text, it->n);
}

static void copy_text(char *to, size_t room, const struct item *it) {
    size_t n = it->n < room - 1 ? it->n : room - 1;
    memcpy(to, it->text, n);
    to[n] = 0;
}

static void read_arg(struct pack *m, struct emu_arg *a) {
    struct item map = next_item(m);
    for (uint64_t n = 0; map.kind == ITEM_MAP && n < map.n; n++) {
        struct item key = next_item(m);
        if (is_text(&key, ".offset"))
            a->offset = (uint32_t)next_item(m).n;
        else if (is_text(&key, ".size"))
            a->size = (uint32_t)next_item(m).n;
        else if (is_text(&key, ".value_kind")) {
            struct item kind = next_item(m);
            copy_text(a->kind, sizeof a->kind, &kind);
        } else
            skip_item(m);
    }
}

static bool read_args(struct pack *m, struct emu_kernel *k) {
    struct item list = next_item(m);
    if (list.kind != ITEM_ARRAY || list.n > 1024)
        return false;
    k->args = calloc(list.n + 1, sizeof *k->args);
    if (!k->args)
        return false;
    k->nargs = (unsigned)list.n;
    for (unsigned n = 0; n < k->nargs; n++)
        read_arg(m, &k->args[n]);
    return true;
}

static bool read_kernel(struct pack *m, struct emu_kernel *k, uint32_t *wavefront) {
    struct item map = next_item(m);
    bool ok = map.kind == ITEM_MAP;
    for (uint64_t n = 0; ok && n < map.n; n++) {
        struct item key = next_item(m);
        if (is_text(&key, ".name")) {
            struct item name = next_item(m);
            copy_text(k->name, sizeof k->name, &name);
        } else if (is_text(&key, ".args"))
            ok = read_args(m, k);
        else if (is_text(&key, ".max_flat_workgroup_size"))
            k->max_flat_wg = (uint32_t)next_item(m).n;
        else if (is_text(&key, ".wavefront_size"))
            *wavefront = (uint32_t)next_item(m).n;
        else
            skip_item(m);
    }
    return ok && k->name[0];
}

static bool read_metadata(struct emu_module *m, const uint8_t *p, size_t bytes, struct emu_error *e) {
    struct pack pack = {p, p + bytes};
    struct item map = next_item(&pack);
    for (uint64_t n = 0; map.kind == ITEM_MAP && n < map.n; n++) {
        struct item key = next_item(&pack);
        if (!is_text(&key, "amdhsa.kernels")) {
            skip_item(&pack);
            continue;
        }
        struct item list = next_item(&pack);
        m->kernels = list.kind == ITEM_ARRAY && list.n <= 4096 ? calloc(list.n + 1, sizeof *m->kernels) : nullptr;
        if (!m->kernels)
            return emu_fail(e, EMU_BAD_IMAGE, "metadata: amdhsa.kernels is not a list");
        for (uint64_t k = 0; k < list.n; k++) {
            uint32_t wavefront = 64;
            m->nkernels++;
            if (!read_kernel(&pack, &m->kernels[k], &wavefront))
                return emu_fail(e, EMU_BAD_IMAGE, "metadata: kernel %u is malformed", (unsigned)k);
            if (wavefront != 64)
                return emu_fail(e, EMU_BAD_IMAGE, "%s: wavefront size %u, only 64 is modelled", m->kernels[k].name,
                                wavefront);
        }
    }
    return true;
}

/* ---- ELF ---- */
static bool check_header(const struct elf *f, struct emu_error *e) {
    const Elf64_Ehdr *h = f->h;
    if (memcmp(h->e_ident, ELFMAG, SELFMAG) != 0 || h->e_ident[EI_CLASS] != ELFCLASS64 || h->e_machine != EM_AMDGPU_ID)
        return emu_fail(e, EMU_BAD_IMAGE, "not an AMDGPU ELF64 code object");
    if (h->e_ident[EI_OSABI] != OSABI_HSA || (h->e_ident[EI_ABIVERSION] != 3 && h->e_ident[EI_ABIVERSION] != 4))
        return emu_fail(e, EMU_BAD_IMAGE, "code object ABI version %u: only V5 (3) and V6 (4) are modelled",
                        h->e_ident[EI_ABIVERSION]);
    if ((h->e_flags & 0xff) != MACH_GFX950)
        return emu_fail(e, EMU_OTHER_GPU, "code object for machine 0x%x, not gfx950 (0x4f)", h->e_flags & 0xff);
    return true;
}

static bool load_segments(struct emu_module *m, const struct elf *f, struct emu_error *e) {
    size_t top = 0;
    for (unsigned n = 0; n < f->h->e_phnum; n++)
        if (f->ph[n].p_type == PT_LOAD && f->ph[n].p_vaddr + f->ph[n].p_memsz > top)
            top = f->ph[n].p_vaddr + f->ph[n].p_memsz;
    m->bytes = (top + 4095) & ~(size_t)4095;
    m->image = m->bytes ? aligned_alloc(4096, m->bytes) : nullptr;
    if (!m->image)
        return emu_fail(e, EMU_BAD_IMAGE, "code object of %zu bytes cannot be loaded", m->bytes);
    memset(m->image, 0, m->bytes);
    for (unsigned n = 0; n < f->h->e_phnum; n++) {
        const Elf64_Phdr *p = &f->ph[n];
        if (p->p_type != PT_LOAD || !p->p_memsz)
            continue;
        memcpy(m->image + p->p_vaddr, f->file + p->p_offset, p->p_filesz);
        if (m->nsegments == sizeof m->segments / sizeof *m->segments)
            return emu_fail(e, EMU_BAD_IMAGE, "more than %u segments", m->nsegments);
        m->segments[m->nsegments++] = (uint64_t)(m->image + p->p_vaddr);
        emu_mem_add((uint64_t)(m->image + p->p_vaddr), p->p_memsz, p->p_flags & PF_W);
    }
    return true;
}

static bool relocate(struct emu_module *m, const struct elf *f, struct emu_error *e) {
    for (unsigned n = 0; n < f->h->e_shnum; n++) {
        if (f->sh[n].sh_type != SHT_RELA || !(f->sh[n].sh_flags & SHF_ALLOC))
            continue;
        const Elf64_Rela *r = (const Elf64_Rela *)(f->file + f->sh[n].sh_offset);
        for (size_t k = 0; k < f->sh[n].sh_size / sizeof *r; k++) {
            if (ELF64_R_TYPE(r[k].r_info) != R_RELATIVE64 || r[k].r_offset + 8 > m->bytes)
                return emu_fail(e, EMU_BAD_IMAGE, "relocation type %u is not modelled",
                                (unsigned)ELF64_R_TYPE(r[k].r_info));
            uint64_t value = (uint64_t)m->image + (uint64_t)r[k].r_addend;
            memcpy(m->image + r[k].r_offset, &value, 8);
        }
    }
    return true;
}

static bool find_notes(struct emu_module *m, const struct elf *f, struct emu_error *e) {
    for (unsigned n = 0; n < f->h->e_phnum; n++) {
        if (f->ph[n].p_type != PT_NOTE)
            continue;
        const uint8_t *p = f->file + f->ph[n].p_offset, *end = p + f->ph[n].p_filesz;
        while (p + sizeof(Elf64_Nhdr) <= end) {
            const Elf64_Nhdr *note = (const Elf64_Nhdr *)p;
            const uint8_t *name = p + sizeof *note, *desc = name + ((note->n_namesz + 3) & ~3u);
            if (note->n_type == NT_METADATA && note->n_namesz == 7 && !memcmp(name, "AMDGPU", 7))
                return read_metadata(m, desc, note->n_descsz, e);
            p = desc + ((note->n_descsz + 3) & ~3u);
        }
    }
    return emu_fail(e, EMU_BAD_IMAGE, "no AMDGPU metadata note");
}

static const Elf64_Sym *find_symbol(const struct elf *f, const char *name) {
    for (unsigned n = 0; n < f->h->e_shnum; n++) {
        const Elf64_Shdr *s = &f->sh[n];
        if (s->sh_type != SHT_DYNSYM && s->sh_type != SHT_SYMTAB)
            continue;
        const Elf64_Sym *sym = (const Elf64_Sym *)(f->file + s->sh_offset);
        const char *strings = (const char *)f->file + f->sh[s->sh_link].sh_offset;
        for (size_t k = 0; k < s->sh_size / sizeof *sym; k++)
            if (!strcmp(strings + sym[k].st_name, name))
                return &sym[k];
    }
    return nullptr;
}

/* ---- kernel descriptor ---- */
static uint32_t word_at(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}

/* A kernel that asks for what is not modelled loads, so that its neighbours run, but does not launch. */
static void check_descriptor(struct emu_kernel *k) {
    uint32_t mode = k->rsrc1 >> 12 & 0xff;
    if (mode != 0xf0 || !(k->rsrc1 >> 21 & 1) || !(k->rsrc1 >> 23 & 1))
        snprintf(k->refusal, sizeof k->refusal,
                 "rsrc1 0x%x: only RNE, kept denormals, DX10_CLAMP and IEEE are modelled", k->rsrc1);
    else if (k->props & ~8u)
        snprintf(k->refusal, sizeof k->refusal,
                 "kernel code properties 0x%x: only the kernarg pointer (0x8) is modelled", k->props);
    else if (k->rsrc2 >> 10 & 1)
        snprintf(k->refusal, sizeof k->refusal, "the workgroup info SGPR is not modelled");
    else if (k->group_segment > EMU_LDS_MAX)
        snprintf(k->refusal, sizeof k->refusal, "%u bytes of LDS, the limit is %u", k->group_segment, EMU_LDS_MAX);
}

static bool read_descriptor(struct emu_module *m, const struct elf *f, struct emu_kernel *k, struct emu_error *e) {
    char symbol[sizeof k->name + 4];
    snprintf(symbol, sizeof symbol, "%s.kd", k->name);
    const Elf64_Sym *kd = find_symbol(f, symbol), *code = find_symbol(f, k->name);
    if (!kd || !code || kd->st_value + 64 > m->bytes)
        return emu_fail(e, EMU_BAD_IMAGE, "%s: no kernel descriptor or code symbol", k->name);
    const uint8_t *d = m->image + kd->st_value;
    int64_t entry;
    memcpy(&entry, d + 16, 8);
    k->group_segment = word_at(d);
    k->private_segment = word_at(d + 4);
    k->kernarg_size = word_at(d + 8);
    k->rsrc3 = word_at(d + 44);
    k->rsrc1 = word_at(d + 48);
    k->rsrc2 = word_at(d + 52);
    k->props = word_at(d + 56) & 0xffff;
    k->preload = word_at(d + 56) >> 16;
    k->entry = kd->st_value + (uint64_t)entry;
    k->code_bytes = code->st_size;
    if (k->entry != code->st_value || k->entry % 256 || k->entry + k->code_bytes > m->bytes)
        return emu_fail(e, EMU_BAD_IMAGE, "%s: entry 0x%llx does not fit its code symbol", k->name,
                        (unsigned long long)k->entry);
    k->entry += (uint64_t)m->image;
    k->env.accum_offset = ((k->rsrc3 & 63) + 1) * 4;
    k->env.vgprs = ((k->rsrc1 & 63) + 1) * 8;
    k->env.sgprs = ((k->rsrc1 >> 6 & 15) / 2 + 1) * 16;
    if (k->env.sgprs > 102)
        k->env.sgprs = 102;
    if (k->env.accum_offset > k->env.vgprs)
        k->env.accum_offset = k->env.vgprs;
    check_descriptor(k);
    return true;
}

/* decodes the kernel's text front to back; what does not decode stops only when it is reached */
static bool decode_text(struct emu_kernel *k, struct emu_error *e) {
    size_t words = k->code_bytes / 4;
    const uint32_t *text = (const uint32_t *)k->entry;
    k->index = calloc(words + 1, sizeof *k->index);
    k->insts = malloc((words + 1) * sizeof *k->insts);
    k->stats = calloc(words + 1, sizeof *k->stats);
    if (!k->index || !k->insts || !k->stats)
        return emu_fail(e, EMU_BAD_IMAGE, "%s: out of memory for %zu words of code", k->name, words);
    for (size_t at = 0; at < words;) {
        struct emu_inst *i = &k->insts[k->ninsts];
        emu_decode(text + at, words - at, &k->env, i);
        i->pc = (uint32_t)(4 * at);
        k->index[at] = ++k->ninsts;
        at += i->nwords ? i->nwords : 1;
    }
    return true;
}

void emu_module_free(struct emu_module *m) {
    if (!m)
        return;
    for (unsigned n = 0; n < m->nkernels; n++) {
        free(m->kernels[n].args);
        free(m->kernels[n].index);
        free(m->kernels[n].insts);
        free(m->kernels[n].stats);
    }
    for (unsigned n = 0; n < m->nsegments; n++)
        emu_mem_remove(m->segments[n]);
    free(m->kernels);
    free(m->image);
    free(m);
}

struct emu_module *emu_module_load(const void *elf, struct emu_error *e) {
    struct elf f = {.file = elf, .h = elf};
    if (!check_header(&f, e))
        return nullptr;
    f.ph = (const Elf64_Phdr *)(f.file + f.h->e_phoff);
    f.sh = (const Elf64_Shdr *)(f.file + f.h->e_shoff);
    struct emu_module *m = calloc(1, sizeof *m);
    if (!m) {
        emu_fail(e, EMU_BAD_IMAGE, "out of memory");
        return nullptr;
    }
    bool ok = load_segments(m, &f, e) && relocate(m, &f, e) && find_notes(m, &f, e);
    for (unsigned n = 0; ok && n < m->nkernels; n++)
        ok = read_descriptor(m, &f, &m->kernels[n], e) && decode_text(&m->kernels[n], e);
    if (ok)
        return m;
    emu_module_free(m);
    return nullptr;
}
