// SPDX-License-Identifier: MIT
/*
 * cuGetProcAddress. A driver chooses among the versions of a function by the CUDA version that the
 * caller names. That is older than 12.0 for all but these.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "elfview.h"
#include "standin.h"

/* Pointers that cuGetProcAddress gives out and that no symbol leads to. */
static CUresult private_function(void)
{
	return CUDA_SUCCESS;
}

/* A driver knows its functions itself: it asks no dlsym(), which a program may have replaced. */
static bool view_own(struct elfview *view)
{
	struct link_map *map;
	Dl_info info;

	return dladdr1((void *)find_builtin, &info, (void **)&map, RTLD_DL_LINKMAP) && mpsd_elfview_of_map(map, view);
}

static const struct {
	const char *symbol;
	int version, since;
} recent[] = {
	{ "cuGetProcAddress", 2, 12000 },
	{ "cuEventElapsedTime", 2, 12080 },
	{ "cuCtxGetDevice", 2, 13000 },
	{ "cuCtxSynchronize", 2, 13000 },
};

static bool is_too_new(const char *symbol, int version, int cuda_version)
{
	for (size_t i = 0; i < sizeof(recent) / sizeof(*recent); i++)
		if (!strcmp(recent[i].symbol, symbol) && recent[i].version == version)
			return cuda_version < recent[i].since;
	return false;
}

static void *look_up(const char *symbol, int cuda_version)
{
	struct elfview own;
	void *found = NULL;
	char versioned[128];

	if (!strcmp(symbol, "cuStandinPrivate"))
		return (void *)private_function;
	if (!view_own(&own))
		return NULL;
	for (int version = 4; version >= 2 && !found; version--) {
		snprintf(versioned, sizeof(versioned), "%s_v%d", symbol, version);
		if (!is_too_new(symbol, version, cuda_version))
			found = mpsd_elfview_address(&own, versioned);
	}
	return found ? found : mpsd_elfview_address(&own, symbol);
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
				 CUdriverProcAddressQueryResult *symbolStatus)
{
	if (!symbol || !pfn || cudaVersion <= 0 || flags > 2)
		return CUDA_ERROR_INVALID_VALUE;
	*pfn = strncmp(symbol, "cu", 2) == 0 ? look_up(symbol, cudaVersion) : NULL;
	if (symbolStatus)
		*symbolStatus = *pfn ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return *pfn || symbolStatus ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#undef cuGetProcAddress
API CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags);
API CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
	return cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, NULL);
}

/* A name that no header declares, as a newer driver has some. */
API CUresult cuStandinFromTheFuture(int *answer);
API CUresult cuStandinFromTheFuture(int *answer)
{
	*answer = 42;
	return CUDA_SUCCESS;
}

/* One table, of the name of 16 times 's'. */
API CUresult cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
	if (!ppExportTable || !pExportTableId)
		return CUDA_ERROR_INVALID_VALUE;
	*ppExportTable = memcmp(pExportTableId, "ssssssssssssssss", 16) == 0 ? &standin_table : NULL;
	return *ppExportTable ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
