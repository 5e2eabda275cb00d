// SPDX-License-Identifier: MIT
/*
 * Images of code. The program may free one as soon as it is loaded, so it is kept: by reference where it lies
 * in a library or the executable, as long as that is there, else as a copy, as long as it says itself that
 * it is (an ELF file, a fat binary, or text with a final zero). Options come along but for buffers to write to.
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "elfview.h"
#include "failover/made.h"
#include "fatbin.h"

#define FATBIN_WRAPPER 0x466243b1u
#define MOST_BYTES ((size_t)4 << 30)
#define MOST_OPTIONS 32

struct fatbin_wrapper {
	uint32_t magic, version;
	const void *data;
};

struct mpsd_image {
	const void *data;
	void *copy;		/* NULL: it lies in a library, */
	struct elfview_place place;	/* which is there, by that name */
	size_t bytes;		/* of a file; 0: it says so itself */
	unsigned int options;
	CUjit_option names[MOST_OPTIONS];
	void *values[MOST_OPTIONS];
};

static size_t larger(size_t a, size_t b)
{
	return a > b ? a : b;
}

static size_t elf_bytes(const Elf64_Ehdr *head)
{
	const Elf64_Shdr *sections = (const Elf64_Shdr *)((const char *)head + head->e_shoff);
	const Elf64_Phdr *segments = (const Elf64_Phdr *)((const char *)head + head->e_phoff);
	size_t end = larger(head->e_shoff + (size_t)head->e_shnum * head->e_shentsize,
			    head->e_phoff + (size_t)head->e_phnum * head->e_phentsize);

	if (head->e_ident[EI_CLASS] != ELFCLASS64)
		return 0;
	for (unsigned int i = 0; i < head->e_shnum; i++)
		if (sections[i].sh_type != SHT_NOBITS)
			end = larger(end, sections[i].sh_offset + sections[i].sh_size);
	for (unsigned int i = 0; i < head->e_phnum; i++)
		end = larger(end, segments[i].p_offset + segments[i].p_filesz);
	return end;
}

/* 0: it does not say. */
static size_t bytes_of(const void *image)
{
	uint32_t magic;

	memcpy(&magic, image, sizeof(magic));
	if (magic == MPSD_FATBIN)
		return ((const struct mpsd_fatbin *)image)->head_bytes + ((const struct mpsd_fatbin *)image)->bytes;
	if (!memcmp(image, ELFMAG, SELFMAG))
		return elf_bytes(image);
	return magic == FATBIN_WRAPPER ? 0 : strlen(image) + 1;
}

bool mpsd_image_writes(CUjit_option name)
{
	switch ((int)name) {
	case CU_JIT_WALL_TIME:
	case CU_JIT_INFO_LOG_BUFFER:
	case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
	case CU_JIT_ERROR_LOG_BUFFER:
	case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
		return true;
	default:
		return false;
	}
}

struct mpsd_image *mpsd_image_keep(const void *image, unsigned int options, const CUjit_option *names, void **values)
{
	struct mpsd_image *kept;
	uint32_t magic;
	size_t size;

	if (!image || options > MOST_OPTIONS)
		return NULL;
	kept = calloc(1, sizeof(*kept));
	if (!kept)
		return NULL;
	memcpy(&magic, image, sizeof(magic));
	if (magic == FATBIN_WRAPPER)
		image = ((const struct fatbin_wrapper *)image)->data;
	kept->data = image;
	/* The executable has no name there, whatever it calls itself. */
	if (!mpsd_elfview_place_of(image, &kept->place)) {
		size = bytes_of(image);
		kept->copy = size && size <= MOST_BYTES ? malloc(size) : NULL;
		kept->data = kept->copy;
		if (!kept->copy) {
			free(kept);
			return NULL;
		}
		memcpy(kept->copy, image, size);
	}
	for (unsigned int i = 0; i < options; i++) {
		if (mpsd_image_writes(names[i]))
			continue;
		kept->names[kept->options] = names[i];
		kept->values[kept->options++] = values[i];
	}
	return kept;
}

/* Now: it may be another file, or none, when it is wanted again. */
struct mpsd_image *mpsd_image_read(const char *path)
{
	struct mpsd_image *kept = NULL;
	FILE *file = path ? fopen(path, "re") : NULL;
	struct stat status;
	char *bytes = NULL;

	if (file && !fstat(fileno(file), &status) && status.st_size >= (off_t)sizeof(uint32_t))
		bytes = calloc(1, (size_t)status.st_size + 1);
	if (bytes && fread(bytes, 1, (size_t)status.st_size, file) == (size_t)status.st_size)
		kept = calloc(1, sizeof(*kept));
	/* What it is the driver looks at first. */
	if (kept)
		*kept = (struct mpsd_image){ .data = bytes, .copy = bytes, .bytes = (size_t)status.st_size };
	else
		free(bytes);
	if (file)
		fclose(file);
	return kept;
}

void mpsd_image_free(struct mpsd_image *image)
{
	if (image) {
		free(image->copy);
		free(image->place.name);
	}
	free(image);
}

/* A library may be closed while its module is loaded, and another one lie there since. */
static bool is_there(const struct mpsd_image *image)
{
	struct elfview_place now;
	bool is;

	if (image->copy || !image->place.name || !mpsd_elfview_place_of(image->data, &now))
		return image->copy;
	is = now.name && now.base == image->place.base && !strcmp(now.name, image->place.name);
	free(now.name);
	return is;
}

const void *mpsd_image_data(const struct mpsd_image *image)
{
	return is_there(image) ? image->data : NULL;
}

size_t mpsd_image_bytes(const struct mpsd_image *image)
{
	if (image->bytes)
		return image->bytes;
	return is_there(image) ? bytes_of(image->data) : 0;
}

unsigned int mpsd_image_options(const struct mpsd_image *image, const CUjit_option **names, void ***values)
{
	*names = image->names;
	*values = (void **)image->values;
	return image->options;
}
