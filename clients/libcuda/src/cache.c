// SPDX-License-Identifier: MIT
/*
 * The loader's own list of libraries, ld.so.cache. dlopen("libcuda.so.1") cannot be asked: by that
 * name it finds the library that is already there, and that is this one.
 */
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>


#include "cache.h"

#define MAGIC "glibc-ld.so.cache1.1"

/* Offsets are from the start of the header. */
struct entry {
	int32_t flags;
	uint32_t name;
	uint32_t path;
	uint32_t os_version;
	uint64_t hardware;
};

struct header {
	char magic[sizeof(MAGIC) - 1];
	uint32_t entries;
	uint32_t string_bytes;
	uint32_t unused[5];
	struct entry entry[];
};

static const char *string_at(const char *data, size_t size, uint32_t offset)
{
	return offset < size && memchr(data + offset, 0, size - offset) ? data + offset : NULL;
}

static bool search(const char *data, size_t size, const char *name,
		   bool (*fits)(const char *path, void *context), void *context)
{
	const struct header *header = (const struct header *)data;

	if (size < sizeof(*header) || memcmp(header->magic, MAGIC, sizeof(header->magic)) != 0 ||
	    header->entries > (size - sizeof(*header)) / sizeof(struct entry))
		return false;
	for (uint32_t i = 0; i < header->entries; i++) {
		const char *found = string_at(data, size, header->entry[i].name);
		const char *path = string_at(data, size, header->entry[i].path);

		if (found && path && !strcmp(found, name) && fits(path, context))
			return true;
	}
	return false;
}

bool mpsd_cache_lookup(const char *cache, const char *name,
		       bool (*fits)(const char *path, void *context), void *context)
{
	int fd = open(cache, O_RDONLY | O_CLOEXEC);
	bool found = false;
	struct stat status;
	void *data;

	if (fd < 0)
		return false;
	if (!fstat(fd, &status) && status.st_size > 0) {
		data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (data != MAP_FAILED) {
			found = search(data, (size_t)status.st_size, name, fits, context);
			munmap(data, (size_t)status.st_size);
		}
	}
	close(fd);
	return found;
}
