// SPDX-License-Identifier: MIT
/*
 * Finds the real driver: MPSD_REAL_LIBCUDA, else where the loader would look, without this library
 * and its copies.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"
#include "elfview.h"
#include "proxy.h"

#define NAME "libcuda.so.1"
#define CACHE "/etc/ld.so.cache"

/* Where the driver lies when no list says so: distributions, containers, WSL, NixOS. */
static const char *const usual_places[] = {
	"/lib64", "/usr/lib64", "/lib", "/usr/lib",
#if defined(__x86_64__)
	"/usr/lib/x86_64-linux-gnu",
#elif defined(__aarch64__)
	"/usr/lib/aarch64-linux-gnu",
#endif
	"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib",
};

struct found {
	void *handle;
	char *path;
	size_t size;
	bool was_there;
};

/* A copy has another inode; it is known by the names of its spare stubs, which lie near its start. */
static bool is_a_proxy(int fd)
{
	static const char mark[] = MPSD_SPARE_PREFIX;
	size_t room = 1 << 18;
	char *start = malloc(room);
	ssize_t size = start ? pread(fd, start, room, 0) : -1;
	bool yes = size > 0 && memmem(start, (size_t)size, mark, sizeof(mark) - 1);

	free(start);
	return yes;
}

static bool is_this_file(const struct stat *status)
{
	struct stat own;
	Dl_info info;

	return dladdr(mpsd_stubs, &info) && !stat(info.dli_fname, &own) && own.st_dev == status->st_dev &&
	       own.st_ino == status->st_ino;
}

static bool is_driver(void *handle)
{
	return mpsd_elfview_symbol(handle, "cuInit") && mpsd_elfview_symbol(handle, "cuDriverGetVersion");
}

/* The program goes first: a real driver that it has opened by its path is its own choice. */
static bool take(const char *path, void *context)
{
	struct found *found = context;
	struct stat status;
	bool ours;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	ours = fstat(fd, &status) || !S_ISREG(status.st_mode) || is_this_file(&status) || is_a_proxy(fd);
	close(fd);
	if (ours)
		return false;
	found->handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
	found->was_there = found->handle != NULL;
	if (!found->handle)
		found->handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
	if (!found->handle)
		return false;
	if (!is_driver(found->handle)) {
		dlclose(found->handle);
		found->handle = NULL;
		return false;
	}
	snprintf(found->path, found->size, "%s", path);
	return true;
}

static bool take_from(const char *folder, size_t length, struct found *found)
{
	char path[4096];

	if (snprintf(path, sizeof(path), "%.*s/" NAME, (int)length, folder) >= (int)sizeof(path))
		return false;
	return take(path, found);
}

/* As the loader reads LD_LIBRARY_PATH: colons or semicolons between, nothing for the working directory. */
static bool take_from_list(const char *list, struct found *found)
{
	while (list) {
		size_t length = strcspn(list, ":;");

		if (length ? take_from(list, length, found) : take_from(".", 1, found))
			return true;
		list = list[length] ? list + length + 1 : NULL;
	}
	return false;
}

static bool take_from_usual_places(struct found *found)
{
	for (size_t i = 0; i < sizeof(usual_places) / sizeof(*usual_places); i++)
		if (take_from(usual_places[i], strlen(usual_places[i]), found))
			return true;
	return false;
}

/* secure_getenv: whoever starts a setuid program does not choose its driver. */
void *mpsd_find_real(char *path, size_t size, bool *was_there)
{
	struct found found = { .path = path, .size = size };
	const char *named = secure_getenv("MPSD_REAL_LIBCUDA");
	const char *list = secure_getenv("LD_LIBRARY_PATH");

	if (named && *named && !take(named, &found))
		mpsd_say("MPSD_REAL_LIBCUDA=%s is not a CUDA driver: searching the loader's paths", named);
	if (!found.handle && !(list && *list && take_from_list(list, &found)) &&
	    !mpsd_cache_lookup(CACHE, NAME, take, &found))
		take_from_usual_places(&found);
	*was_there = found.was_there;
	return found.handle;
}
