/* A packed matrix, as kernels.py describes it. */
#include <stdint.h>

enum codes { PAIRS = 0, INT8 = 1, FLOAT8 = 2, PLANES = 3, BYTES = 4 }; /* or one of `gguf` */
enum numbers { FLOAT32 = 0, BFLOAT16 = 1, SCALE_FLOAT8 = 2, FLOAT16 = 3, UINT8 = 4 };

/* What kernels.py fills in, in this order. */
typedef struct {
    int64_t columns, groups;     /* of a row; for GGUF its bytes instead of groups */
    int32_t codes_kind, scale_kind;
    int32_t divides;             /* whether `factor` divides the scale */
    int32_t group_bytes;         /* of the codes of a group of PLANES */
    int32_t zero_kind;
    const uint8_t *codes;        /* [rows, bytes of a row] */
    const void *scale;           /* [rows, groups]; GGUF's are among the codes */
    const void *zero;            /* [rows, groups] or NULL */
    const float *factor;         /* [rows] or NULL: of a row's scales */
    const float *values;         /* [16]: what the codes of PAIRS stand for */
    const void *least;           /* [rows, groups] or NULL: what is added at last, so code 0 of PLANES; like the scales */
} weight;
