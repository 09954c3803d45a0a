/* Tiles: registers of AMX with up to 16 rows of 64 bytes. Included where GCC may use its instructions. */
#ifndef TILES_H
#define TILES_H
#include "compiler.h"
#include <immintrin.h>

#define TILE_ROWS 16 /* rows */

typedef struct {
    uint8_t palette, start, unused[14]; /* palette: 1 */
    uint16_t bytes[16];                 /* of each tile's rows */
    uint8_t rows[16];
} tile_shapes;

#define WRITTEN() __asm__ volatile("" ::: "memory") /* GCC 12 doesn't know how much memory tiles and their shapes read */

INLINE void shape_tiles(const tile_shapes *shapes) {
    WRITTEN();
    _tile_loadconfig(shapes);
}
#endif
