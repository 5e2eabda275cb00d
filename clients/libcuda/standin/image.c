// SPDX-License-Identifier: MIT
/*
 * What a module is made of. An image is a text:
 *
 *	standin module
 *	kernel NAME FUNCTION MICROSECONDS
 *	global NAME BYTES
 *
 * or has one in it, up to an empty line, be it PTX, an ELF file or a fat binary: the rest is not looked at. The one kernel
 * that the proxy itself brings is known by its name.
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"

#define MARK "standin module\n"

/*
 * What was unloaded last is handed out first: a handle that is had again is then no matter of chance. Not for a sanitizer,
 * which is to see who uses one that has gone.
 */
static struct CUfunc_st *unloaded;	/* with the lock */

static struct CUfunc_st *new_function(void)
{
	struct CUfunc_st *function = unloaded;

	if (!function)
		return calloc(1, sizeof(*function));
	unloaded = function->next;
	memset(function, 0, sizeof(*function));
	return function;
}

static void end_function(struct CUfunc_st *function)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	free(function);
#else
	function->next = unloaded;
	unloaded = function;
#endif
}

static CUresult add_kernel(struct CUmod_st *module, const char *line)
{
	struct CUfunc_st *function = new_function();
	unsigned int microseconds;
	char builtin[64];

	if (!function)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (sscanf(line, "kernel %63s %63s %u", function->name, builtin, &microseconds) == 3)
		function->builtin = find_builtin(builtin);
	if (!function->builtin) {
		end_function(function);
		return CUDA_ERROR_INVALID_IMAGE;
	}
	is_new(function);
	function->duration_ns = (uint64_t)microseconds * 1000;
	function->module = module;
	start_attributes(function);
	function->next = module->functions;
	module->functions = function;
	return CUDA_SUCCESS;
}

static CUresult add_global(struct CUmod_st *module, const char *line)
{
	struct global *global = calloc(1, sizeof(*global));
	CUresult result = CUDA_ERROR_INVALID_IMAGE;

	if (!global)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (sscanf(line, "global %63s %zu", global->name, &global->size) == 2 && global->size)
		result = device_alloc(&global->address, global->size);
	if (result != CUDA_SUCCESS) {
		free(global);
		return result;
	}
	global->next = module->globals;
	module->globals = global;
	return CUDA_SUCCESS;
}

uintptr_t first_global(const struct CUfunc_st *function)
{
	const struct global *global = function->module->globals;

	while (global && global->next)
		global = global->next;
	return global ? global->address : 0;
}

void free_module(struct CUmod_st *module)
{
	struct CUfunc_st *function;
	struct global *global;

	while ((function = module->functions)) {
		module->functions = function->next;
		is_gone(function);
		end_function(function);
	}
	while ((global = module->globals)) {
		module->globals = global->next;
		device_free(global->address);
		free(global);
	}
	is_gone(module);
	free(module);
}

/* elf(5), and the head of a fat binary: magic, version, its own size, that of what follows. */
static size_t bytes_of(const char *image)
{
	uint16_t head_bytes;
	uint64_t bytes;

	if (!strncmp(image, "\x50\xed\x55\xba", 4)) {
		memcpy(&head_bytes, image + 6, sizeof(head_bytes));
		memcpy(&bytes, image + 8, sizeof(bytes));
		return head_bytes + bytes;
	}
	if (!strncmp(image, ELFMAG, SELFMAG)) {
		const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;

		return head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
	}
	return strlen(image);
}

CUresult read_image(struct CUmod_st *module, const char *image)
{
	bool is_ptx = !strncmp(image, ".version", 8);
	CUresult result = CUDA_SUCCESS;

	if (is_ptx && strstr(image, ".entry mpsd_page_sums("))
		return add_kernel(module, "kernel mpsd_page_sums page_sums 0");
	if (is_ptx && strstr(image, ".entry mpsd_sums_differ("))
		return add_kernel(module, "kernel mpsd_sums_differ sums_differ 0");
	if (is_ptx && strstr(image, ".entry mpsd_copy("))
		return add_kernel(module, "kernel mpsd_copy copy_bytes 0");
	if (is_ptx && strstr(image, ".entry mpsd_save_ranges("))
		return add_kernel(module, "kernel mpsd_save_ranges save_ranges 0");
	image = memmem(image, bytes_of(image), MARK, strlen(MARK));
	if (!image)
		return CUDA_ERROR_INVALID_IMAGE;
	image += strlen(MARK);
	while (*image && *image != '\n' && result == CUDA_SUCCESS) {
		const char *end = strchrnul(image, '\n');

		if (!strncmp(image, "kernel ", 7))
			result = add_kernel(module, image);
		else if (!strncmp(image, "global ", 7))
			result = add_global(module, image);
		else if (end != image)
			result = CUDA_ERROR_INVALID_IMAGE;
		image = *end ? end + 1 : end;
	}
	return result;
}
