// SPDX-License-Identifier: MIT
/* Links: the images (module.c) one behind the other. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define MARK "standin module\n"

struct CUlinkState_st {
	char *text;		/* as long as it has become, with a final zero */
};

API CUresult cuLinkCreate_v2(unsigned int numOptions, CUjit_option *options, void **optionValues, CUlinkState *stateOut)
{
	(void)options;
	(void)optionValues;
	if (!stateOut || (numOptions && (!options || !optionValues)))
		return CUDA_ERROR_INVALID_VALUE;
	*stateOut = calloc(1, sizeof(**stateOut));
	if (!*stateOut)
		return CUDA_ERROR_OUT_OF_MEMORY;
	is_new(*stateOut);
	(*stateOut)->text = strdup(MARK);
	return (*stateOut)->text ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
			      unsigned int numOptions, CUjit_option *options, void **optionValues)
{
	size_t length, mark = strlen(MARK);
	char *larger;

	(void)type;
	(void)name;
	(void)numOptions;
	(void)options;
	(void)optionValues;
	must_live(state);
	if (!state || !data || size < mark || memcmp(data, MARK, mark))
		return CUDA_ERROR_INVALID_IMAGE;
	length = strlen(state->text);
	larger = realloc(state->text, length + size - mark + 1);
	if (!larger)
		return CUDA_ERROR_OUT_OF_MEMORY;
	memcpy(larger + length, (char *)data + mark, size - mark);
	larger[length + size - mark] = 0;
	state->text = larger;
	return CUDA_SUCCESS;
}

API CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int numOptions,
			      CUjit_option *options, void **optionValues)
{
	CUresult result = CUDA_ERROR_FILE_NOT_FOUND;
	char text[4096];
	FILE *file = path ? fopen(path, "r") : NULL;

	if (file) {
		size_t size = fread(text, 1, sizeof(text), file);

		fclose(file);
		result = cuLinkAddData_v2(state, type, text, size, path, numOptions, options, optionValues);
	}
	return result;
}

API CUresult cuLinkComplete(CUlinkState state, void **cubinOut, size_t *sizeOut)
{
	must_live(state);
	if (!state || !cubinOut)
		return CUDA_ERROR_INVALID_VALUE;
	*cubinOut = state->text;
	if (sizeOut)
		*sizeOut = strlen(state->text) + 1;
	return CUDA_SUCCESS;
}

API CUresult cuLinkDestroy(CUlinkState state)
{
	must_live(state);
	if (!state)
		return CUDA_ERROR_INVALID_VALUE;
	free(state->text);
	is_gone(state);
	free(state);
	return CUDA_SUCCESS;
}
