// The blocks of ggml whose numbers are points of grids: IQ2 and IQ3. Four or eight numbers are one of 256 to 1,024 points, and have
// signs beside it.
//
// A coordinate is one of 3 or 8 sizes. In panels a number is an index of a codebook (quantized_format.h): that of its size, or if it
// has a sign the same in the second half.
#pragma once
#include "ggml_blocks.h"

// Points in ascending order, each a number whose digits, to the base SIZES, are the indices of its coordinates, the first one the
// lowest. A character of the text is the distance from one point to the next ('#' is 0, '$' is 1, ...), half of it where there are 3
// sizes, as all distances are even there; '~' is 91 on the way to a point.
template <int POINTS, int COORDINATES, int SIZES> struct Grid {
    static constexpr int WIDTH = COORDINATES, SIGN_PLACE = SIZES == 3 ? 4 : 8;
    uint8_t indices[POINTS][COORDINATES];

    constexpr explicit Grid(const char* distances) : indices{} {
        for (int i = 0, point = 0; *distances; distances++) {
            point += (*distances - '#') * (SIZES == 3 ? 2 : 1);
            if (*distances == '~') continue;
            for (int k = 0, rest = point; k < COORDINATES; k++, rest /= SIZES) indices[i][k] = rest % SIZES;
            i++;
        }
    }
};

constexpr Grid<256, 4, 8> IQ3_XXS_GRID(
    R"(#%%(%'$%*,<%'%(%*'&%*./+%%(*%*%'-)1')$%.F67(./%')63V:7'%813%(%*%(%%.$;%**%R%(%**E)%1,03.'FK'56/p1C%*%(%'&,B%%&%**>'$+%*)$%0$07*')"
    R"(O'D1;7->h%.:?*%*%80()%1,.%>%(08325`26))/>B58K87.1%/'p72$3)4ABH.D18p&%1U::+)3:B1C+L@.'F+:rO1U3%1@CAHG)iDHTK1U%%$53O-M>(9018D3B%5g)");
constexpr Grid<512, 4, 8> IQ3_S_GRID(
    R"(#$$&%$$$%%%$')(%&%%%(%*&&$$$%'$'&&'%'*0'()$'%$&&&'&')&%%%0&+)'&%*%&)'%0%'&.'%&))&)2-%/%'()'%2(.&%142*%%/%'(0'7$$%'$%%%$%*&%1%&,))"
    R"($%&%'(*&)*%1)%-&%$'))&-&-*&&$&))$'(4).%(%0%*'%'8*&)*%2J'&0%>%(%*/'4)+$%%%$%%%&%'$%*%%&%0$&%&%)&'&&'&)*;&&-%(*%-'-&'%&',%(%*)1.),)"
    R"(&*&'<&*(,0$.0+%(-?'7'0%.(=*%%%&*%%(%&%-)+%%*(%03-'%-)-%/<*'(%'$,%')1+)('*4)'0*%.(--066C%0%.F'))'&&**3-(%%*)())'7%(('-(2&)/(%(%*')"
    R"(F%5.$</%-D<47;(..)<)')1'&&/)(%%(*,C),-()0:($20(/))&/-/G/6%ZC%1Z%%/%833*@95).()+/(2X121&<78>L%X'&,%/%/)3*.2%?&')&*4<;&19')(;M3C:J)");
constexpr Grid<256, 8, 3> IQ2_XXS_GRID(
    R"(#$$$$$$&$%$$$&&%$&$&)'$&%*2))$,50$&($&$%)($&)&$%)*-$(/$,2,&%$&)%$&$.//?(F$&(',)&%*&),'(;(<&)%)-834*E$&,10%E:9$&.+'$<';$K$&,*71-S)"
    R"(/);b=$&&%$&&'%($&,,1'%/'/'(2&)5+.(AL$&,%<8%(?3,&%&$5&/0:FK$/H68(&3AAJ&,/27?25%N$:f~3$&-11))CG$&%*,534.-,6LOH&)&:.7@<-(O}9l4.2HS~)"
    R"(L;)");
constexpr Grid<512, 8, 3> IQ2_XS_GRID(
    R"(#$$$$$$$$$$$$%$$$$$$$%$&$$$%$%$($$$$$$$$$$&$$$%$&&%$&,$$$%$&($&%*'-$$$$$$$%$&$$$%$$%($&,$$$%$&($&('1$&*%$1/$$$$$$&%&$&&),'$$&,1&)"
    R"(-,&9%($$$$$$$%$&$$$%$&'$$&,$$$%$&($&,)$*$$%,,5$$$%$&($%$)&1$&,>).;$&$+)-.%:E8$$$$$$$&($&,,($&,&+3-4/%$&+$>1(3)+A%&$(.-*@)/)6%$-$)"
    R"($$$$$$%$&$$$$$$&%&$&,$$$%$&($&,%+'$&$*$>$$$%$%$($&,)+$&)&9('.&:$&,%''4(-&+3J$$$%$&&%$&,1$&%*$=2<$$&(',(,'&;&73.')+'41($Z/$&,)')-)"
    R"($V*2+*I,%9O=<C4'4$$$%$&'$$&,$.$$$$%,(&6,5$+&%$&$$*,+-2:-61&+.($.'S4&'(%$&,*+/-1H--%0&&C6$9P76A35$%$('::&4%$%-1,57k--($%;&&>$:$6+)");
constexpr Grid<1024, 8, 3> IQ2_S_GRID(
    R"(#$$$$$$$$$$$$%$$$$$$$%$$$$$$$%$&%%$$$$$$$$%$&$$$%$$$$%$%$&$$&$&$$$%$&'$$$$$%*%%%''$$$$$$$%$$$$$$$$$$$$$$$&$$$$%$%$&$$$$$$$$$%$%$)"
    R"($$$$$$%$&$$$%$&($$$$%*%$%$&($&,$$$%$$$$%%$$$$$$$$%$&%'*$$&$$$%'%$%$&(',($'%$(4)$$$$$$$%$$%$$$%$$$$$$$%$$%%$%$&$$$$$$$$$$$$%$$$$$)"
    R"($$%$&$$$%$+$%$%&$&%&$+$&,$$$%$$$$%$%$$$$$$$%$&$$$%$&($$$$$$$%$&$$$%$&($&,%$%$&($&,0$$$$$%$%'$$$%$&($/$$$%$&($&+.(&,*7$$$%$$$$%%$)"
    R"($&$$'&'%*$$&$$&'$$&$&($&,')%$%&/$+%$$$$%$%$&$$$%$&($&,%$%$&($&*%1$&,+6%&$+$&0,$$&@.)1)$-$$$$$$$$$$$%$$$$$$$$$$$&$&%$%$&$$$%$$$$$)"
    R"($&$$$$$$$%$&$$$%$&($&$$$&&%$%$&($/$$$$$$$$$$$$%$$$$$$$%$&$$$%$&($$$$$$$%$&$$$%$&'$$&,$$$%$&($&,.&$%$$$$%$&$$$%$&)&,$$$%$&($&,**$)"
    R"(&,>$$$%$$$$$$$%$$$$$$$%$&$$$%$+$$$$$$$%$&$$$%$&($&,%$%$&($&+$1$$$$$$$%$&$$$%$&($&,$$$%$&($&,1$&*%>$$$%$&($&'(1$&,>+8-%$$%$$$%$&%)"
    R"($%$&)&,$$$%$&($&,+*&,*3'%$%$&($&,1$&,'+*+D+$&7-)0M9'$$$%$%$%&$&$$$%'%&$+$%$$$$%$&$$$%$+$&+$%%$$+$&:$$$$$$$%'$$$%$&($&,$$$%$&($&,)"
    R"('-$&+$>%&$+$&6'$/.=.$),'$%$$$$&&$$$%$&($&,%&$+$&'6$&,<%$$$%$&($&,**$&,8%'3+4$&*%=$4%X,%%%'&$$&6&1.4&)%$2%$+%$&,4*&+V=+<:-1$($%5-)");

// The numbers of a run, whose points are point(0), ... and whose signs, a bit of each, are in the bytes signs(0) to signs(3).
template <class G> static INLINE void read_points(const G& grid, auto point, auto signs, uint8_t* numbers) {
    for (int i = 0; i < 32; i++)
        numbers[i] = grid.indices[point(i / G::WIDTH)][i % G::WIDTH] + (signs(i / 8) >> i % 8 & 1) * G::SIGN_PLACE;
}

// Eight signs of which seven are stored: an even number of them is set.
static INLINE int eight_signs(uint32_t seven) { return (seven & 127) | __builtin_parity(seven & 127) << 7; }

// A factor: 4 bits are s of 2 s + 1; those of even ones are the lower halves of bytes.
static INLINE uint8_t factor(const uint8_t* halves, int i) { return 2 * (halves[i / 2] >> i % 2 * 4 & 15) + 1; }

// A scale that is so much of a float16, as a float32.
static INLINE void put32(uint8_t* header, size_t output, const uint8_t* half, float part) {
    const uint8_t halves[2 * LANES] = {half[0], half[1]};
    const float scale = load_halves(halves)[0] * part;
    std::memcpy(header + 4 * output, &scale, 4);
}

struct IQ3_S {
    static constexpr int BITS = 4, BYTES = 110;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const auto point = [&](int i) { return block[2 + 8 * run + i] | (block[66 + run] >> i & 1) << 8; };
        read_points(IQ3_S_GRID, point, [&](int i) { return block[74 + 4 * run + i]; }, numbers);
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put16(to, 0, output, block);
        for (int run = 0; run < 8; run++) to[2 * GROUP + run * GROUP + output] = factor(block + 106, run);
    }
};

// Behind all points a dword for each run: four times seven signs, and a factor.
struct IQ3_XXS {
    static constexpr int BITS = 4, BYTES = 98;
    static INLINE uint32_t dword(const uint8_t* block, int run) { return load<uint32_t>(block + 66 + 4 * run); }
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const auto signs = [&](int i) { return eight_signs(dword(block, run) >> 7 * i); };
        read_points(IQ3_XXS_GRID, [&](int i) { return block[2 + 8 * run + i]; }, signs, numbers);
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put32(to, output, block, 0.25f);
        for (int run = 0; run < 8; run++) to[4 * GROUP + run * GROUP + output] = 2 * (dword(block, run) >> 28) + 1;
    }
};

// The factors of IQ2_XS and IQ2_S, one for each half of a run.
static INLINE void put_half_factors(const uint8_t* block, const uint8_t* factors, uint8_t* to, size_t output) {
    put32(to, output, block, 0.125f);
    for (int half = 0; half < 16; half++) to[4 * GROUP + half * GROUP + output] = factor(factors, half);
}

struct IQ2_S {
    static constexpr int BITS = 3, BYTES = 82;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const auto point = [&](int i) { return block[2 + 4 * run + i] | (block[66 + run] >> 2 * i & 3) << 8; };
        read_points(IQ2_S_GRID, point, [&](int i) { return block[34 + 4 * run + i]; }, numbers);
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) { put_half_factors(block, block + 74, to, output); }
};

// Words: nine bits of a point, and seven signs.
struct IQ2_XS {
    static constexpr int BITS = 3, BYTES = 74;
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const auto word = [&](int i) { return load<uint16_t>(block + 2 + 8 * run + 2 * i); };
        read_points(IQ2_XS_GRID, [&](int i) { return word(i) & 511; }, [&](int i) { return eight_signs(word(i) >> 9); }, numbers);
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) { put_half_factors(block, block + 66, to, output); }
};

// For each run four points, and behind them a dword as IQ3_XXS has it.
struct IQ2_XXS {
    static constexpr int BITS = 3, BYTES = 66;
    static INLINE uint32_t dword(const uint8_t* block, int run) { return load<uint32_t>(block + 6 + 8 * run); }
    static INLINE void read(const uint8_t* block, int run, uint8_t* numbers) {
        const auto signs = [&](int i) { return eight_signs(dword(block, run) >> 7 * i); };
        read_points(IQ2_XXS_GRID, [&](int i) { return block[2 + 8 * run + i]; }, signs, numbers);
    }
    static INLINE void header(const uint8_t* block, uint8_t* to, size_t output) {
        put32(to, output, block, 0.125f);
        for (int half = 0; half < 16; half++)
            to[4 * GROUP + half * GROUP + output] = 2 * (dword(block, half / 2) >> 28) + 1;
    }
};
