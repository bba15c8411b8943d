// Decode attention on a paged KV cache, on a CPU, in float32: one query of each of many sequences of any length.
//
// Keys and values of a head are (slots, features); a sequence is a list of blocks of slots. They are read where they
// are. All query heads of a key head use a block while it is in the cache.

struct Call {
    const float *query, *keys, *values;
    float *out, *scores;                     // scores: per thread, one per query head of a key head and position
    const int64_t *rows, *lengths, *blocks;  // of each sequence: its token, its positions, its blocks
    int64_t threads, sequences, heads, groups, features, block, table, longest, window;
    int64_t query_row, query_head, out_row, head;  // strides; `head`: of keys and values
    double scale;
};

void attend(const Call& c, int64_t sequence, int64_t h, float* scores) {
    const int64_t length = c.lengths[sequence], *blocks = c.blocks + sequence * c.table;
    const int64_t first = c.window > 0 && length > c.window ? length - c.window : 0, count = length - first;
    const float* query = c.query + c.rows[sequence] * c.query_row + h * c.groups * c.query_head;
    float* out = c.out + c.rows[sequence] * c.out_row + h * c.groups * c.features;
    const float *keys = c.keys + h * c.head, *values = c.values + h * c.head;
    const float scale = static_cast<float>(c.scale);
    for (int64_t at = first; at < length;) {
        const int64_t offset = at % c.block, rest = length - at;
        const int64_t here = c.block - offset < rest ? c.block - offset : rest;
        const float* key = keys + (blocks[at / c.block] * c.block + offset) * c.features;
        for (int64_t g = 0; g < c.groups; ++g) {
            const float* q = query + g * c.query_head;
            float* s = scores + g * c.longest + at - first;
            for (int64_t i = 0; i < here; ++i) {
                Floats sum = {};
                for (int64_t f = 0; f < c.features; f += LANES) sum += load(q + f) * load(key + i * c.features + f);
                s[i] = total(sum) * scale;
            }
        }
        at += here;
    }
    for (int64_t g = 0; g < c.groups; ++g) {
        float* s = scores + g * c.longest;
        const float normalizer = 1.0f / exponentiate(s, count);
        for (int64_t i = 0; i < count; ++i) s[i] *= normalizer;
    }
    std::memset(out, 0, c.groups * c.features * sizeof(float));
    for (int64_t at = first; at < length;) {
        const int64_t offset = at % c.block, rest = length - at;
        const int64_t here = c.block - offset < rest ? c.block - offset : rest;
        const float* value = values + (blocks[at / c.block] * c.block + offset) * c.features;
        for (int64_t g = 0; g < c.groups; ++g) {
            const float* s = scores + g * c.longest + at - first;
            float* o = out + g * c.features;
            for (int64_t f = 0; f < c.features; f += LANES) {
                Floats sum = load(o + f);
                for (int64_t i = 0; i < here; ++i) sum += s[i] * load(value + i * c.features + f);
                store(o + f, sum);
            }
        }
        at += here;
    }
}

extern "C" void run(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.sequences * c.heads; ++i)
        attend(c, i / c.heads, i % c.heads, c.scores + omp_get_thread_num() * c.groups * c.longest);
}
