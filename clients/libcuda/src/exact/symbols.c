// SPDX-License-Identifier: MIT
/*
 * The variables of an image of code, by their names: symbols of an ELF file in its sections of global memory, or what a
 * text of PTX declares. Nothing in an image is believed: what lies outside of it is not looked at.
 *
 * Format of ELF: elf(5); names of sections: what nvcc writes. Format of fat binaries: as nvcc writes them. PTX: the PTX ISA,
 * "State Spaces", "Linking Directives".
 */
#include "exact/symbols.h"

#include <ctype.h>
#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fatbin.h"

#define MOST ((uint64_t)1 << 30)	/* bytes of one part, packed or not */
#define CUDA_MALLOC "malloc"

struct bytes {
	const char *at;
	size_t size;
};

/* What lies there, wholly; NULL: it does not. */
static const void *within(struct bytes bytes, uint64_t offset, uint64_t size)
{
	return offset <= bytes.size && size <= bytes.size - offset ? bytes.at + offset : NULL;
}

/* The text at that place of a table, which has an end in it. NULL: there is none. */
static const char *text_at(struct bytes table, uint64_t offset)
{
	const char *text = within(table, offset, 1);

	return text && memchr(text, 0, table.size - offset) ? text : NULL;
}

/* Texts, for printf() and assert(), and other constants that have no name of their own. */
static bool is_compilers(struct bytes name)
{
	static const char unnamed[] = "__unnamed_";
	size_t size = sizeof(unnamed) - 1;

	return *name.at == '$' || (name.size >= size && !memcmp(name.at, unnamed, size));
}

/* ELF */

struct sections {
	const char *first;
	size_t step, count;
	struct bytes file, names;
};

static bool section(const struct sections *all, size_t number, Elf64_Shdr *found)
{
	if (number >= all->count)
		return false;
	memcpy(found, all->first + number * all->step, sizeof(*found));
	return true;
}

static struct bytes contents(const struct sections *all, const Elf64_Shdr *of)
{
	const void *at = of->sh_type == SHT_NOBITS ? NULL : within(all->file, of->sh_offset, of->sh_size);

	return (struct bytes){ at, at ? of->sh_size : 0 };
}

static bool open_elf(struct bytes file, struct sections *all)
{
	const void *at = within(file, 0, sizeof(Elf64_Ehdr));
	Elf64_Ehdr head;
	Elf64_Shdr names;

	if (!at)
		return false;
	memcpy(&head, at, sizeof(head));
	at = within(file, head.e_shoff, (uint64_t)head.e_shnum * head.e_shentsize);
	if (head.e_ident[EI_CLASS] != ELFCLASS64 || !at || head.e_shentsize < sizeof(Elf64_Shdr))
		return false;
	*all = (struct sections){ at, head.e_shentsize, head.e_shnum, file, { NULL, 0 } };
	if (!section(all, head.e_shstrndx, &names))
		return false;
	all->names = contents(all, &names);
	return true;
}

static bool is_global(const struct sections *all, size_t number)
{
	static const char global[] = ".nv.global";
	Elf64_Shdr its;
	const char *name;

	if (!section(all, number, &its) || !(name = text_at(all->names, its.sh_name)))
		return false;
	/* .nv.global, .nv.global.init, and either with a name behind it. */
	return !strncmp(name, global, sizeof(global) - 1) && (!name[sizeof(global) - 1] || name[sizeof(global) - 1] == '.');
}

static void take_symbol(const struct sections *all, struct bytes texts, const Elf64_Sym *symbol,
			struct mpsd_symbols *found)
{
	const char *name = text_at(texts, symbol->st_name);
	unsigned int type = ELF64_ST_TYPE(symbol->st_info);

	if (!name || !*name)
		return;
	if (type == STT_FUNC && symbol->st_shndx == SHN_UNDEF && !strcmp(name, CUDA_MALLOC))
		found->has_heap = true;
	if (type == STT_OBJECT && !is_compilers((struct bytes){ name, strlen(name) }) && is_global(all, symbol->st_shndx))
		found->add(found->to, name, strlen(name));
}

static void read_elf(struct bytes file, struct mpsd_symbols *found)
{
	struct sections all;
	Elf64_Shdr table, texts;

	if (!open_elf(file, &all)) {
		found->is_unread = true;
		return;
	}
	for (size_t i = 0; i < all.count; i++) {
		struct bytes symbols, names;

		if (!section(&all, i, &table) || table.sh_type != SHT_SYMTAB || !section(&all, table.sh_link, &texts))
			continue;
		symbols = contents(&all, &table);
		names = contents(&all, &texts);
		for (size_t at = 0; at + sizeof(Elf64_Sym) <= symbols.size; at += sizeof(Elf64_Sym)) {
			Elf64_Sym symbol;

			memcpy(&symbol, symbols.at + at, sizeof(symbol));
			take_symbol(&all, names, &symbol, found);
		}
	}
}

/* PTX */

static bool is_of_name(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

static void skip(struct bytes *left, size_t size)
{
	left->at += size;
	left->size -= size;
}

/* The next word of a statement, a directive with its dot; its length is 0 at anything else, and at the end. */
static struct bytes word(struct bytes *left)
{
	struct bytes found;

	while (left->size && isspace((unsigned char)*left->at))
		skip(left, 1);
	found = (struct bytes){ left->at, left->size && *left->at == '.' };
	while (found.size < left->size && is_of_name(found.at[found.size]))
		found.size++;
	skip(left, found.size);
	return found;
}

static bool is_word(struct bytes found, const char *wanted)
{
	return found.size == strlen(wanted) && !memcmp(found.at, wanted, found.size);
}

static bool is_linking(struct bytes found)
{
	return is_word(found, ".visible") || is_word(found, ".weak") || is_word(found, ".common");
}

/* What .attribute has behind it. */
static void skip_brackets(struct bytes *left)
{
	const char *end = left->size && *left->at == '(' ? memchr(left->at, ')', left->size) : NULL;

	if (end)
		skip(left, (size_t)(end + 1 - left->at));
}

/* From the beginning of a line: [linking] .global {.type | .align N | .v2 | .attribute(...)} NAME */
static void read_line(struct bytes line, struct mpsd_symbols *found)
{
	struct bytes next = word(&line);

	if (is_linking(next))
		next = word(&line);
	if (!is_word(next, ".global"))
		return;
	while ((next = word(&line)).size) {
		if (*next.at == '.' || isdigit((unsigned char)*next.at)) {
			skip_brackets(&line);
			continue;
		}
		if (!is_compilers(next))
			found->add(found->to, next.at, next.size);
		return;
	}
}

static void read_text(struct bytes text, struct mpsd_symbols *found)
{
	while (text.size) {
		const char *end = memchr(text.at, '\n', text.size);
		size_t length = end ? (size_t)(end - text.at) : text.size;

		read_line((struct bytes){ text.at, length }, found);
		if (memmem(text.at, length, ".func", 5) && memmem(text.at, length, CUDA_MALLOC, strlen(CUDA_MALLOC)))
			found->has_heap = true;
		skip(&text, length + (end != NULL));
	}
}

static void read_code(struct bytes code, struct mpsd_symbols *found)
{
	if (code.size >= SELFMAG && !memcmp(code.at, ELFMAG, SELFMAG))
		read_elf(code, found);
	else
		read_text(code, found);
}

/* Fat binaries */

enum { PTX = 1, ELF = 2 };	/* kinds of parts */
enum { LZ4 = 0x2000, ZSTD = 0x8000 };

struct part {
	uint16_t kind, version;
	uint32_t head_bytes;
	uint64_t bytes;			/* behind the head, filled up */
	uint32_t packed_bytes, reserved;
	uint32_t version_of_code;
	uint32_t arch;
	uint64_t name;
	uint64_t flags;
	uint64_t reserved2;
	uint64_t unpacked_bytes;
};

/* lz4.h, zstd.h */
static int (*lz4)(const char *from, char *to, int from_size, int to_size);
static size_t (*zstd)(void *to, size_t to_size, const void *from, size_t from_size);

static void *find(const char *library, const char *name)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);

	return handle ? dlsym(handle, name) : NULL;
}

void mpsd_symbols_start(void)
{
	*(void **)&lz4 = find("liblz4.so.1", "LZ4_decompress_safe");
	*(void **)&zstd = find("libzstd.so.1", "ZSTD_decompress");
}

static bool unpack(struct bytes from, bool is_zstd, char *to, size_t size)
{
	if (is_zstd)
		return zstd && zstd(to, size, from.at, from.size) == size;
	return lz4 && lz4(from.at, to, (int)from.size, (int)size) == (int)size;
}

static void read_part(const struct part *part, struct bytes data, struct mpsd_symbols *found)
{
	bool is_packed = part->flags & (LZ4 | ZSTD);
	char *unpacked;

	if (!is_packed) {
		read_code(data, found);
		return;
	}
	if (part->packed_bytes > data.size || part->packed_bytes > MOST || part->unpacked_bytes > MOST ||
	    !(unpacked = malloc(part->unpacked_bytes + 1))) {
		found->is_unread = true;
		return;
	}
	data.size = part->packed_bytes;
	if (unpack(data, part->flags & ZSTD, unpacked, part->unpacked_bytes))
		read_code((struct bytes){ unpacked, part->unpacked_bytes }, found);
	else
		found->is_unread = true;
	free(unpacked);
}

/* The next part, and what is in it. False: there is none. */
static bool next_part(struct bytes *left, struct part *part, struct bytes *data)
{
	const void *at = within(*left, 0, sizeof(*part));

	if (!at)
		return false;
	memcpy(part, at, sizeof(*part));
	at = within(*left, part->head_bytes, part->bytes);
	if (part->head_bytes < sizeof(*part) || !at)
		return false;
	*data = (struct bytes){ at, part->bytes };
	left->size -= part->head_bytes + part->bytes;
	left->at = data->at + part->bytes;
	return true;
}

/* Of one kind the newest that the GPU can have; 0: there is none. */
static uint32_t best_arch(struct bytes parts, unsigned int kind, unsigned int arch)
{
	struct part part;
	struct bytes data;
	uint32_t best = 0;

	while (next_part(&parts, &part, &data))
		if (part.kind == kind && part.arch <= arch && part.arch > best)
			best = part.arch;
	return best;
}

static void read_fatbin(struct bytes file, const struct mpsd_fatbin *head, unsigned int arch, struct mpsd_symbols *found)
{
	struct bytes parts, data;
	struct part part;
	uint32_t best;
	unsigned int kind = ELF;

	if (!within(file, head->head_bytes, 0)) {
		found->is_unread = true;
		return;
	}
	parts = (struct bytes){ file.at + head->head_bytes, file.size - head->head_bytes };
	best = best_arch(parts, ELF, arch);
	if (!best)
		best = best_arch(parts, kind = PTX, arch);
	if (!best)
		found->is_unread = true;
	while (next_part(&parts, &part, &data))
		if (part.kind == kind && part.arch == best)
			read_part(&part, data, found);
}

void mpsd_symbols_read(const void *image, size_t size, unsigned int arch, struct mpsd_symbols *found)
{
	struct bytes file = { image, size };
	struct mpsd_fatbin head = { 0 };

	if (size >= sizeof(head))
		memcpy(&head, image, sizeof(head));
	if (head.magic == MPSD_FATBIN)
		read_fatbin(file, &head, arch, found);
	else
		read_code(file, found);
}
