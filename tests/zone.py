import sys,os
sys.path[:0]=['/work/main/tests','/work/main']
from ranks import RankPool, RankError
from zoo.cases import find
from zoo.check import check
import tempfile,time,json
if __name__=='__main__':
    import warnings; warnings.simplefilter('ignore')
    name=sys.argv[1]; w=int(sys.argv[2])
    c=find(name); m=c.make(); d=None
    if c.kind!='module':
        d=tempfile.mkdtemp(); m.save_pretrained(d)
    pool=RankPool(w)
    try:
        r=pool.run(check,name,d,timeout=float(sys.argv[3]) if len(sys.argv)>3 else 300)
        print(json.dumps(r[0],indent=1)[:3000])
    except Exception as e:
        print(str(e)[:30000])
    pool.close()
